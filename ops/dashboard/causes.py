"""Failures grouped by cause: texts that differ in numbers, ids and paths alone are one cause."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ..journal import Failed
from ..terminal import printable

LONGEST = 2000
"""Characters of a text that are looked at."""
SHOWN = 240
GROUPS = 100
"""Causes that are told apart. Who makes up more has them counted together."""
OTHERS = "other causes"
EXAMPLES = 5
_PARTS = re.compile(
    r"(?P<path>[a-z][a-z0-9+.-]{1,15}://[^\s'\"<>]{1,400}|(?<![\w/])\.{0,2}/[^\s'\",;:()<>]{1,400})"
    r"|(?P<n>(?<!\w)\d+(?:[.,]\d+)*(?!\w))"
    r"|(?P<id>\b0x[0-9a-fA-F]+\b|\b(?=[a-fA-F]*\d)[0-9a-fA-F]{8,}(?:-[0-9a-fA-F]{4,})*\b)"
    r"|(?P<d>\d+(?:\.\d+)*)"
)
_NAMES = {"path": "<path>", "n": "<n>", "id": "<id>", "d": "<n>"}


def normalised(text: str) -> str:
    """The text with its numbers, ids, hexadecimal words and paths replaced, in one line of at most SHOWN characters."""
    plain = " ".join(printable(text[:LONGEST], keep="\n\t").split())
    return _PARTS.sub(lambda found: _NAMES[found.lastgroup or "n"], plain)[:SHOWN]


def id_of(cause: str) -> str:
    """The id of a group, by its normalised cause."""
    return hashlib.blake2b(cause.encode("utf-8", "replace"), digest_size=8).hexdigest()


@dataclass(slots=True)
class Group:
    """Jobs that failed for one cause. entries: of dead letters, the ids of all of them. Times are Unix seconds."""

    cause: str
    example: str
    count: int = 0
    first: float = float("inf")
    last: float = float("-inf")
    jobs: list[str] = field(default_factory=list)
    entries: list[str] = field(default_factory=list)

    @property
    def id(self) -> str:
        return id_of(self.cause)

    def as_data(self) -> dict[str, Any]:
        """For the page."""
        return {
            "id": self.id, "cause": self.cause, "example": self.example, "count": self.count, "first": self.first,
            "last": self.last, "jobs": list(self.jobs), "requeueable": bool(self.entries),
        }  # fmt: skip


def grouped(failures: Iterable[Failed]) -> list[Group]:
    """The groups, the largest first."""
    groups: dict[str, Group] = {}
    for one in failures:
        cause = normalised(one.text)
        if cause not in groups and len(groups) >= GROUPS:
            cause = OTHERS
        group = groups.setdefault(cause, Group(cause, printable(one.text[:SHOWN])))
        group.count += 1
        group.first, group.last = min(group.first, one.at), max(group.last, one.at)
        if len(group.jobs) < EXAMPLES:
            group.jobs.append(one.job_id)
        if one.entry:
            group.entries.append(one.entry)
    return sorted(groups.values(), key=lambda it: (-it.count, it.cause))


EMPTY_ROW: dict[str, Any] = {
    "sample": None, "client": "", "worker": "", "tokens": None, "oldest_version": None, "newest_version": None,
    "reward": None, "fate": None, "session": "", "finish_reason": "",
}  # fmt: skip
"""A row of the list of rollouts, without what is known of it."""


def waiting_row(job_id: str, at: float, told: str, client: str = "") -> dict[str, Any]:
    """A job in the list of rollouts that waits. told: for what."""
    return EMPTY_ROW | {"job_id": job_id, "at": at, "state": "waiting", "why": printable(told), "client": client}


def failed_rows(failures: Iterable[Failed], limit: int, before: float) -> dict[str, Any]:
    """Jobs that failed before a time, in the list of rollouts: the newest first, and where the next page begins."""
    found = sorted((one for one in failures if one.at < before), key=lambda one: -one.at)
    told = [{"job_id": one.job_id, "at": one.at, "state": "dead", "why": printable(one.text)} for one in found[:limit]]
    return {"rows": [EMPTY_ROW | one for one in told], "next": repr(told[-1]["at"]) if len(found) > limit else None}
