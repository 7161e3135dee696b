"""Compaction of a journal: few large segments in place of many small ones, without what is not wanted any more."""

from __future__ import annotations

import math
import time
from dataclasses import asdict
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from ....messages.journal import Entry, Event, Merged, merge
from ....messages.model import Float, Int
from .operation import Check, Context, Operation, Params, operation

Events = Annotated[
    tuple[Event, ...], BeforeValidator(lambda given: given.split(",") if isinstance(given, str) else given)
]


class JournalCompactParams(Params):
    """journal: its folder on the worker's host. keep_s: entries older than so many seconds are dropped. without: kinds
    of entries that are dropped where segments are merged. segment_bytes: size of a merged segment, about. grace_s:
    seconds until segments that were merged are deleted; no reader may take longer."""

    journal: str = Field(pattern="^/")
    keep_s: Float | None = Field(default=None, gt=0)
    without: Events = ()
    segment_bytes: Int = Field(default=256 << 20, ge=1 << 20, le=1 << 40)
    grace_s: Float = Field(default=3600.0, ge=60, le=30 * 86400)


@operation
class JournalCompact(Operation[JournalCompactParams]):
    """Merge a journal's small segments into large ones, and drop entries by age and kind."""

    name = "journal-compact"
    params = JournalCompactParams
    timeout_s = 6 * 3600

    async def run(self, context: Context, params: JournalCompactParams) -> dict[str, Any]:
        """Each entry is in the journal once, wherever a run is cut off; a repeated one merges the rest."""

        def work(check: Check) -> Merged:
            def wanted(entry: Entry) -> Entry | None:
                check()
                return None if entry.event in params.without else entry

            return merge(
                params.journal,
                segment_bytes=params.segment_bytes,
                since=-math.inf if params.keep_s is None else time.time() - params.keep_s,
                change=wanted,
                grace_s=params.grace_s,
                progress=lambda done, total: context.progress(done, total, "segments merged"),
            )

        told = await context.blocking(work)
        return asdict(told)
