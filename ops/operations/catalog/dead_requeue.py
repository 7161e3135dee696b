"""Bulk requeue of dead letters."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from pydantic import Field

from ....messages.broker import Broker, DeadFilter, DeadLetters
from ....messages.errors import CannotRequeue, InvalidField, NoSuchDeadLetter, PoolBusy
from ....messages.model import Float, Int
from .operation import Context, Operation, Params, operation

RETRY_S = 0.25
TOLD = 20
"""The result names at most so many of the letters that cannot be requeued."""


class DeadRequeueParams(Params):
    """cause: only letters whose cause contains this. since: Unix seconds by Redis' clock. limit: most letters (a few
    more if the run was cut off and started again). reply_to: client that gets the results instead of the submitter.
    patience_s: how long the run waits for a busy pool."""

    cause: str = ""
    since: Float | None = Field(default=None, ge=0)
    limit: Int | None = Field(default=None, ge=1)
    reply_to: str | None = Field(default=None, pattern=r"^[A-Za-z0-9_.-]{1,128}$")
    patience_s: Float = Field(default=300.0, ge=0, le=86400)


@operation
class DeadRequeue(Operation[DeadRequeueParams]):
    """Submit dead letters again, oldest first, each as a new job; what cannot be a job stays and is counted."""

    name = "dead-requeue"
    params = DeadRequeueParams
    timeout_s = 6 * 3600

    async def run(self, context: Context, params: DeadRequeueParams) -> dict[str, Any]:
        """Requeued letters are gone, so a repeated run goes on with the rest."""
        letters = DeadLetters(Broker(context.redis, context.pool))
        if "until" not in context.notes:
            # Jobs that die from here on, perhaps by this requeue, are left out: the run would never end.
            context.note(until=await letters.newest_id(), requeued=0)
        until, requeued, looked = context.notes["until"], int(context.notes["requeued"]), 0
        refused: list[dict[str, str]] = []
        refusals = 0
        if until is None:
            return _result(0, 0, refused)
        left = None if params.limit is None else params.limit - requeued
        total = await letters.count() if left is None else left
        which = DeadFilter(cause=params.cause, since=params.since, until=until, limit=left)
        async for head in letters.find(which, newest_first=False):
            looked += 1
            try:
                await _patiently(context, letters, head.entry_id, params)
                requeued += 1
                context.notes["requeued"] = requeued
            except NoSuchDeadLetter:
                pass  # somebody else was here
            except (CannotRequeue, InvalidField) as error:
                refusals += 1
                if len(refused) < TOLD:
                    refused.append({"entry_id": head.entry_id, "why": str(error)})
            context.progress(looked, total, f"{requeued} requeued, {refusals} refused")
        context.progress(looked, looked, f"{requeued} requeued, {refusals} refused", now=True)
        return _result(requeued, refusals, refused)

    def found_trouble(self, result: dict[str, Any]) -> bool:
        return bool(result["refused"])


def _result(requeued: int, refused: int, told: list[dict[str, str]]) -> dict[str, Any]:
    return {"requeued": requeued, "refused": refused, "refusals": told}


async def _patiently(context: Context, letters: DeadLetters, entry_id: str, params: DeadRequeueParams) -> None:
    """Requeue, waiting while the pool is busy. Raises PoolBusy when it stayed so for `patience_s`."""
    deadline = time.monotonic() + params.patience_s
    while True:
        try:
            await letters.requeue(entry_id, reply_to=params.reply_to)
            return
        except PoolBusy as busy:
            if time.monotonic() >= deadline:
                raise
            shown = context.notes["requeued"]
            context.progress(shown, None, f"{shown} requeued; waiting: {busy}")
            await asyncio.sleep(RETRY_S)
