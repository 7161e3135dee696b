"""Compaction of a journal: few large segments in place of many small ones, without what is not wanted any more."""

from __future__ import annotations

import math
import time
from dataclasses import asdict
from typing import Annotated, Any

from pydantic import Field

from ....messages.journal import Entry, Event, Merged, merge
from ....messages.model import Float, Int
from .operation import Check, Commas, Context, HostPath, operation


@operation(timeout_s=6 * 3600)
async def journal_compact(
    context: Context,
    *,
    journal: HostPath,
    keep_s: Annotated[Float | None, Field(gt=0)] = None,
    without: Annotated[tuple[Event, ...], Commas] = (),
    segment_bytes: Annotated[Int, Field(ge=1 << 20, le=1 << 40)] = 256 << 20,
    grace_s: Annotated[Float, Field(ge=60, le=30 * 86400)] = 3600.0,
) -> dict[str, Any]:
    """Merge a journal's small segments into large ones, and drop entries by age and kind.

    keep_s: entries older than so many seconds are dropped. without: kinds of entries that are dropped where segments
    are merged. segment_bytes: size of a merged segment, about. grace_s: seconds until segments that were merged are
    deleted; no reader may take longer. Each entry is in the journal once, wherever a run is cut off; a repeated one
    merges the rest.
    """

    def work(check: Check) -> Merged:
        def wanted(entry: Entry) -> Entry | None:
            check()
            return None if entry.event in without else entry

        return merge(
            journal,
            segment_bytes=segment_bytes,
            since=-math.inf if keep_s is None else time.time() - keep_s,
            change=wanted,
            grace_s=grace_s,
            progress=lambda done, total: context.progress(done, total, "segments merged"),
        )

    return asdict(await context.blocking(work))
