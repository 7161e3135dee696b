"""Google Cloud: `instance/preempted`, which becomes TRUE 30 seconds before a spot machine is stopped."""

from __future__ import annotations

from urllib.parse import quote

from .metadata import Metadata

PREEMPTED = "/computeMetadata/v1/instance/preempted"
FLAVOR = "Metadata-Flavor"
WAIT_S = 60


class GcpNotices:
    """Pre-emption of a Compute Engine machine. The service answers as soon as the value changes."""

    pause_s = 1.0

    def __init__(self) -> None:
        self._etag: str | None = None

    async def look(self, metadata: Metadata) -> str:
        """See Notices. The first look says how it is now, each later one waits for a change."""
        path, wait_s = PREEMPTED, 0
        if self._etag is not None:
            path += f"?wait_for_change=true&timeout_sec={WAIT_S}&last_etag={quote(self._etag, safe='')}"
            wait_s = WAIT_S
        answer = await metadata.ask(path, {FLAVOR: "Google"}, wait_s=wait_s)
        if answer.headers.get(FLAVOR.lower()) != "Google":
            raise ValueError("the answer is not of Google's metadata service")
        value = answer.body.strip().upper()
        if value not in {"TRUE", "FALSE"}:
            raise ValueError(f"instance/preempted says {answer.body[:80]!r}")
        self._etag = answer.headers.get("etag", "0")[:256]  # "0" answers at once
        return "instance/preempted is TRUE" if value == "TRUE" else ""
