"""Azure: Scheduled Events of the type `Preempt`, at least 30 seconds before a spot machine is deleted."""

from __future__ import annotations

from typing import Any

from .metadata import Metadata

EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
HEADERS = {"Metadata": "true"}


class AzureNotices:
    """Pre-emption of this virtual machine. The machines of a scale set see each other's events, which name theirs."""

    pause_s = 1.0

    async def look(self, metadata: Metadata) -> str:
        """See Notices."""
        answer = await metadata.ask(EVENTS, HEADERS)
        told = answer.json()
        events = told.get("Events") if isinstance(told, dict) else None
        if not isinstance(events, list):
            raise ValueError(f"scheduledevents says {answer.body[:80]!r}")
        if not (preempted := [event for event in events if _names_of_preempted(event)]):
            return ""
        name = (await metadata.ask(NAME, HEADERS)).body.strip().lower()
        for event in preempted:
            if name in _names_of_preempted(event):
                return f"Preempt, not before {str(event.get('NotBefore'))[:40]!r}"
        return ""


def _names_of_preempted(event: Any) -> frozenset[str]:
    """The machines that this event is about, in small letters; none if it is no pre-emption."""
    if not isinstance(event, dict) or event.get("EventType") != "Preempt":
        return frozenset()
    resources = event.get("Resources")
    return frozenset(str(name).lower() for name in resources) if isinstance(resources, list) else frozenset()
