"""Bulk requeue of dead letters."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Any

from pydantic import Field

from ....messages.broker import Broker, DeadFilter, DeadLetters
from ....messages.errors import CannotRequeue, InvalidField, NoSuchDeadLetter, PoolBusy
from ....messages.model import Float, Int
from .operation import Context, operation

RETRY_S = 0.25
TOLD = 20
"""The result names at most so many of the letters that cannot be requeued."""


@operation(timeout_s=6 * 3600, found_trouble=lambda result: bool(result["refused"]))
async def dead_requeue(
    context: Context,
    *,
    cause: str = "",
    since: Annotated[Float | None, Field(ge=0)] = None,
    limit: Annotated[Int | None, Field(ge=1)] = None,
    reply_to: Annotated[str | None, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")] = None,
    patience_s: Annotated[Float, Field(ge=0, le=86400)] = 300.0,
) -> dict[str, Any]:
    """Submit dead letters again, oldest first, each as a new job; what cannot be a job stays and is counted.

    cause: only letters whose cause contains this. since: Unix seconds by Redis' clock. limit: most letters (a few more
    if the run was cut off and started again). reply_to: client that gets the results instead of the submitter.
    patience_s: how long the run waits for a busy pool. Requeued letters are gone, so a repeated run goes on with the
    rest.
    """
    letters = DeadLetters(Broker(context.redis, context.pool))
    if "until" not in context.notes:
        # Jobs that die from here on, perhaps by this requeue, are left out: the run would never end.
        context.note(until=await letters.newest_id(), requeued=0)
    until, requeued, looked = context.notes["until"], int(context.notes["requeued"]), 0
    refused: list[dict[str, str]] = []
    if until is None:
        return {"requeued": 0, "refused": 0, "refusals": []}
    left = None if limit is None else limit - requeued
    total = await letters.count() if left is None else left
    which = DeadFilter(cause=cause, since=since, until=until, limit=left)
    async for head in letters.find(which, newest_first=False):
        looked += 1
        try:
            await _patiently(context, letters, head.entry_id, reply_to, patience_s)
            requeued += 1
            context.notes["requeued"] = requeued
        except NoSuchDeadLetter:
            pass  # somebody else was here
        except (CannotRequeue, InvalidField) as error:
            refused.append({"entry_id": head.entry_id, "why": str(error)})
        context.progress(looked, total, f"{requeued} requeued, {len(refused)} refused")
    context.progress(looked, looked, f"{requeued} requeued, {len(refused)} refused", now=True)
    return {"requeued": requeued, "refused": len(refused), "refusals": refused[:TOLD]}


async def _patiently(
    context: Context, letters: DeadLetters, entry_id: str, reply_to: str | None, patience_s: float
) -> None:
    """Requeue, waiting while the pool is busy. Raises PoolBusy when it stayed so for `patience_s`."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            await letters.requeue(entry_id, reply_to=reply_to)
            return
        except PoolBusy as busy:
            if time.monotonic() >= deadline:
                raise
            shown = context.notes["requeued"]
            context.progress(shown, None, f"{shown} requeued; waiting: {busy}")
            await asyncio.sleep(RETRY_S)
