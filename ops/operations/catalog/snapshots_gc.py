"""Garbage collection of snapshots that neither a late worker nor a replay needs."""

from __future__ import annotations

import math
from typing import Any

from pydantic import Field

from ....messages.journal import TORN, read
from ....messages.model import Float, Int
from ....sync.transfer import Ledger
from ...weights_disk import store_in
from .operation import Check, Context, Operation, Params, operation

TOLD = 20
"""The result has at most so many problems."""


class SnapshotsGcParams(Params):
    """folder: of the snapshots, on the worker's host. keep: newest versions that stay. journal: folder of a journal;
    versions that sampled its results between since and until (Unix seconds) stay. delete: remove, and not only tell."""

    folder: str = Field(pattern="^/")
    keep: Int = Field(ge=1)
    journal: str = Field(default="", pattern="^(/.*)?$")
    since: Float | None = None
    until: Float | None = None
    delete: bool = False


@operation
class SnapshotsGc(Operation[SnapshotsGcParams]):
    """Say which snapshots nobody needs, and remove them with delete=true."""

    name = "snapshots-gc"
    params = SnapshotsGcParams

    async def run(self, context: Context, params: SnapshotsGcParams) -> dict[str, Any]:
        """A repeated run removes what is left. What is pinned or being read stays in any case."""
        store = store_in(params.folder, params.keep)
        problems: list[str] = []
        needed = await context.blocking(lambda check: _needed(params, problems, check))
        needed.add(await Ledger(context.redis, context.pool).committed())
        garbage = store.collectable(needed)
        # What cannot be read may name any version.
        removed = store.collect(needed) if params.delete and not problems else []
        left = store.versions()
        told = {"garbage": [version for version in garbage if version in left], "removed": removed, "left": left}
        kept = {"pinned": sorted(store.pinned()), "needed": sorted(needed & set(left))}
        return told | kept | {"problems": problems[:TOLD]}

    def found_trouble(self, result: dict[str, Any]) -> bool:
        return bool(result["problems"])


def _needed(params: SnapshotsGcParams, problems: list[str], check: Check) -> set[int]:
    """The versions of which a journal's results have tokens. problems: gets what could not be read."""

    def unread(problem: str) -> None:
        if not problem.endswith(TORN):  # nothing behind that can be replayed
            problems.append(problem)

    if not params.journal:
        return set()
    since = -math.inf if params.since is None else params.since
    until = math.inf if params.until is None else params.until
    results = read(params.journal, events="result", since=since, until=until, on_problem=unread)
    needed: set[int] = set()
    for entry in results:
        check()
        needed.update(entry.versions)
    return needed
