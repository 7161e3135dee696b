"""Garbage collection of snapshots that neither a late worker nor a replay needs."""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import Field

from ....messages.journal import TORN, read
from ....messages.model import Float, Int
from ....sync.transfer import Ledger
from ...weights_disk import store_in
from .operation import Check, Context, HostPath, operation

TOLD = 20
"""The result has at most so many problems."""


@operation(found_trouble=lambda result: bool(result["problems"]))
async def snapshots_gc(
    context: Context,
    *,
    folder: HostPath,
    keep: Annotated[Int, Field(ge=1)],
    journal: Annotated[str, Field(pattern="^(/.*)?$")] = "",
    since: Float | None = None,
    until: Float | None = None,
    delete: bool = False,
) -> dict[str, Any]:
    """Say which snapshots nobody needs, and remove them with delete=true.

    keep: newest versions that stay. journal: folder of a journal; versions that sampled its results between since and
    until (Unix seconds) stay. delete: remove, and not only tell. A repeated run removes what is left. What is pinned or
    being read stays in any case.
    """
    store = store_in(folder, keep)
    problems: list[str] = []

    def unread(problem: str) -> None:
        if not problem.endswith(TORN):  # nothing behind that can be replayed
            problems.append(problem)

    def sampled(check: Check) -> set[int]:
        found: set[int] = set()
        first, last = -math.inf if since is None else since, math.inf if until is None else until
        for entry in read(journal, events="result", since=first, until=last, on_problem=unread) if journal else ():
            check()
            found.update(entry.versions)
        return found

    needed = await context.blocking(sampled)
    needed.add(await Ledger(context.redis, context.pool).committed())
    garbage = store.collectable(needed)
    # What cannot be read may name any version.
    removed = store.collect(needed) if delete and not problems else []
    left = store.versions()
    told = {"garbage": [version for version in garbage if version in left], "removed": removed, "left": left}
    kept = {"pinned": sorted(store.pinned()), "needed": sorted(needed & set(left))}
    return told | kept | {"problems": problems[:TOLD]}
