"""A pool's dead letters, read once and then only what is new, in groups by cause; a group submitted again."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from ...messages.broker import Broker, DeadLetters, LetterHead
from ...messages.errors import CannotRequeue, InvalidField, NoSuchDeadLetter, PoolBusy
from ..journal import Failed
from .causes import Group, grouped

log = logging.getLogger(__name__)
PAGE = 512
MOST = 10_000
"""Letters of a shard that are kept in mind, as many as Redis keeps."""


class Letters:
    """The dead letters of all shards. failed: all of them; groups: by cause."""

    def __init__(self, parts: Sequence[Broker]) -> None:
        self._parts = parts
        self._boxes = [DeadLetters(part) for part in parts]
        self._known: list[dict[str, LetterHead]] = [{} for _ in parts]  # newest first
        self.failed: list[Failed] = []
        self.groups: list[Group] = []
        self._counts: list[int] = []

    async def read(self) -> None:
        """Look for what is new. Raises RedisError."""
        counts = [await box.count() for box in self._boxes]
        if counts == self._counts:
            return
        for place, (box, count) in enumerate(zip(self._boxes, counts, strict=True)):
            known = self._known[place]
            fresh = await self._newer(box, known)
            if len(fresh) + len(known) != count:  # some were requeued, dropped, or made room
                fresh, known = await self._newer(box, {}), {}
            self._known[place] = fresh | known
        self._counts = counts
        self.failed = [
            Failed(one.at, one.job_id, f"{one.cause}: {one.error}" if one.error else one.cause, f"{place}/{entry}")
            for place, known in enumerate(self._known)
            for entry, one in known.items()
        ]
        self.groups = grouped(self.failed)

    async def _newer(self, box: DeadLetters, known: dict[str, LetterHead]) -> dict[str, LetterHead]:
        found: dict[str, LetterHead] = {}
        before: str | None = None
        while len(found) < MOST:
            page = await box.page(before=before, count=PAGE)
            for one in page:
                if one.entry_id in known:
                    return found
                found[one.entry_id] = one
            if len(page) < PAGE:
                break
            before = page[-1].entry_id
        return found

    async def requeue(self, group: str) -> dict[str, Any] | None:
        """Submit the jobs of a group again, exactly those that it had when it was last shown. None: no such group.

        Returns how many letters are jobs again, how many cannot be, and how many were left because of `why`, such as
        a pool that is busy. Raises RedisError.
        """
        found = next((one for one in self.groups if one.id == group), None)
        if found is None:
            return None
        done = refused = 0
        why = ""
        for entry in found.entries:
            place, _, entry_id = entry.partition("/")
            try:
                await self._boxes[int(place)].requeue(entry_id)
                done += 1
            except NoSuchDeadLetter:
                pass  # somebody else was here
            except (CannotRequeue, InvalidField) as error:
                refused, why = refused + 1, str(error)
            except PoolBusy as error:
                why = str(error)
                break
        left = max(0, len(found.entries) - done - refused) if why else 0
        log.warning("requeued %d dead letters of group %s (%s), refused %d, left %d", done, group, found.cause, refused,
                    left)  # fmt: skip
        return {"requeued": done, "refused": refused, "left": left, "why": why}
