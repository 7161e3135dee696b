"""When nobody can send the committed version any more: its trainer says so, and the pool may begin again without it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from ...messages.errors import WeightSyncError
from ...messages.redis import Keys
from ...messages.scripts import Scripts, calls
from .ledger import Ledger, holder_of
from .order import VersionHolder, parts_of

ANSWERS_S = 2.0


async def offers_no_more(ledger: Ledger, holder: VersionHolder) -> None:
    """A trainer ends, which has offered the committed version there: nobody needs to try whether it still does."""
    said, mine = await ledger.redis.hget(ledger.keys.holders, ""), holder.to_json().encode()
    if said == mine:  # and not a later trainer's
        await ledger.redis.hset(ledger.keys.holders, "", "")


async def begin_again(redis: Any, pool: str, having: Sequence[str]) -> int:
    """Let no version be committed, in every shard, so that workers serve what they have: their checkpoint, version 0.

    having: the living workers that have the committed version. Returns that version. A later one has to have a higher
    number.
    Raises WeightSyncError if there was none, a worker has it, or a publisher is there that can send it.
    """
    ledger = Ledger(redis, pool)
    committed, _, transfer = await ledger.heading()
    if not committed:
        raise WeightSyncError("the pool has no version yet: its workers serve their checkpoint")
    if having:
        raise WeightSyncError(
            f"version {committed} is not lost: {', '.join(having[:3])} has it, and gives it to others"
        )
    told = await ledger.announced(transfer) if transfer else None
    trainer = holder_of(await redis.hget(ledger.keys.holders, "") or b"")
    places = [(told.host, str(told.port))] if told is not None else []
    places += [parts_of(trainer.address)] if trainer is not None else []
    for host, port in places:
        if await _answers(host, port):
            raise WeightSyncError(f"a publisher is there, at {host} port {port}: publish a new version with it instead")
    for shard, its in enumerate(getattr(redis, "shards", ()) or (redis,)):
        left = int(await Scripts(its, Keys(pool, shard)).run(calls.begin_again(committed)))
        if left and not shard:
            raise WeightSyncError(f"version {left} was committed just now")
    return committed


async def _answers(host: str, port: str) -> bool:
    try:
        async with asyncio.timeout(ANSWERS_S):
            _, writer = await asyncio.open_connection(host, int(port))
    except (OSError, ValueError):
        return False
    writer.close()
    return True
