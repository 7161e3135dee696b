"""Who comes late, or comes back, takes the version from other workers when no trainer is there, and nobody restarts."""

from __future__ import annotations

import asyncio
from typing import Any

from support.peers.publishing import weights
from support.pools.late import check_equal, publish, publish_and_leave, publisher, serve, version_of
from support.pools.pool import eventually, worker

from rolloutmq.ops.status import pool_state
from rolloutmq.sync.transfer.ledger import Ledger, VersionHolder
from rolloutmq.sync.transfer.order import TransferOrder, TransferReport
from rolloutmq.worker.scripted.engine import ScriptedEngine


async def offered(ledger: Ledger, version: int) -> set[str]:
    """Who is known to offer a version, "" for the trainer."""
    raw = await ledger.redis.hgetall(ledger.keys.holders)
    return {name.decode() for name, value in raw.items() if f'"version":{version},'.encode() in value}


async def test_a_worker_without_a_trainer_takes_the_version_from_another(redis_db: str, ledger: Ledger) -> None:
    async with worker(redis_db) as first:
        await publish_and_leave(redis_db, 1, 2)
        assert await offered(ledger, 2) >= {first.id}
        transfers = await ledger.redis.hget(ledger.keys.weights, "epochs")
        async with worker(redis_db) as late:
            await eventually(lambda: version_of(late) == 2)
            check_equal(late.engine, 2)
            assert await ledger.redis.hget(ledger.keys.weights, "epochs") == transfers  # it is nobody's transfer
            assert await ledger.committed() == 2
            await eventually(lambda: offers(ledger, 2, {first.id, late.id}))
            await first.stop()
            assert await serve(redis_db, 2) == {(2,)}
            assert await offered(ledger, 2) - {""} == {late.id}
            async with worker(redis_db) as later:  # what came from another one can be handed on
                await eventually(lambda: version_of(later) == 2)
                check_equal(later.engine, 2)
                async with publisher(redis_db) as source:
                    assert (await publish(source, 3)).workers == tuple(sorted([late.id, later.id]))


async def offers(ledger: Ledger, version: int, workers: set[str]) -> bool:
    return workers <= await offered(ledger, version)


async def test_while_the_trainer_lives_it_says_from_whom_to_take_it(redis_db: str, ledger: Ledger) -> None:
    async with worker(redis_db) as first, publisher(redis_db) as source:
        await publish(source, 1)
        await eventually(lambda: offers(ledger, 1, {"", first.id}))
        (outgoing,) = source._sender._offered[""]
        sent = outgoing.offer.sent_bytes
        async with worker(redis_db) as late:
            await eventually(lambda: version_of(late) == 1)
            check_equal(late.engine, 1)
            assert late.id in outgoing.joined
            assert outgoing.offer.sent_bytes == sent  # from `first`: late ones cost the trainer nothing


async def test_when_nobody_has_it_everybody_waits_and_says_so(redis_db: str, ledger: Ledger) -> None:
    async with worker(redis_db) as one, worker(redis_db) as two:
        await publish_and_leave(redis_db, 1)
        for running in (one, two):
            running.engine._receiver.forget(held=False)  # as a process that ends with its engine
            running.engine.kill()
        for running in (one, two):
            await eventually(running.engine.healthy)
        await eventually(lambda: said(redis_db, {one.id, two.id}))
        async with publisher(redis_db) as source:
            await publish(source, 2)
        assert await serve(redis_db, 2) == {(2,)}


async def said(url: str, waiting: set[str]) -> bool:
    state = await pool_state(url, "default")
    return set(state["waiting_for_weights"]) == waiting and {w["state"] for w in state["workers"]} == {"syncing"}


async def test_an_entry_that_leads_nowhere_is_passed_over(redis_db: str, ledger: Ledger) -> None:
    """A worker that was killed is still named there until its lease is over."""
    async with worker(redis_db) as first, worker(redis_db) as second:
        await publish_and_leave(redis_db, 1)
        trainer, workers = await ledger.holders(1)
        token = (trainer or workers[0]).token
        await second.crash()
        for number in range(3):
            await ledger.holds(f"gone{number}", VersionHolder(1, f"127.0.0.1:{number + 1}", token))
        async with worker(redis_db) as late:
            await eventually(lambda: version_of(late) == 1)
            check_equal(late.engine, 1)
        assert version_of(first) == 1


class Held(ScriptedEngine):
    """Stops before it takes a version until it is let go on."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self.reached, self.free = asyncio.Event(), asyncio.Event()
        self.took: list[TransferReport] = []

    async def prepare_weights(self, order: TransferOrder) -> TransferReport:
        self.reached.set()
        await self.free.wait()
        self.took.append(await super().prepare_weights(order))
        return self.took[-1]


async def test_a_joiner_that_dies_costs_the_others_nothing(redis_db: str, ledger: Ledger) -> None:
    dying = Held()
    async with worker(redis_db) as first:
        await publish_and_leave(redis_db, 1)
        async with worker(redis_db, engine=dying) as lost:
            await eventually(dying.reached.is_set)
            await lost.die()
            assert await serve(redis_db, 2) == {(1,)}
            async with worker(redis_db) as late:
                await eventually(lambda: version_of(late) == 1)
                check_equal(late.engine, 1)
            assert version_of(first) == 1
            assert lost.id not in await offered(ledger, 1)


async def test_a_trainer_that_comes_back_goes_first(redis_db: str, ledger: Ledger) -> None:
    slow = Held()
    async with worker(redis_db) as first:
        await publish_and_leave(redis_db, 1)
        async with worker(redis_db, engine=slow) as late, publisher(redis_db) as source:
            await eventually(slow.reached.is_set)
            handle = source.publish(2, weights(2).items())
            await eventually(lambda: at(ledger, 2))
            slow.free.set()
            report: Any = await asyncio.to_thread(handle.wait, 60)
            assert (set(report.workers), report.failures) == ({first.id, late.id}, {})
            for running in (first, late):
                check_equal(running.engine, 2)
                assert running.engine.starts == 1
        assert await serve(redis_db, 1) == {(2,)}


async def at(ledger: Ledger, version: int) -> bool:
    return await ledger.committed() == version


async def test_a_worker_that_was_behind_may_hand_it_on_at_once(redis_db: str, ledger: Ledger) -> None:
    """Two come late together, and one of those that have it leaves: nobody is a bottleneck, and nobody waits."""
    async with worker(redis_db) as one, worker(redis_db) as two:
        await publish_and_leave(redis_db, 1)
        async with worker(redis_db) as late, worker(redis_db) as later:
            await one.die()
            await eventually(lambda: version_of(late) == version_of(later) == 1)
            check_equal(late.engine, 1)
            check_equal(later.engine, 1)
            assert version_of(two) == 1
            await eventually(lambda: offers(ledger, 1, {late.id, later.id}))
