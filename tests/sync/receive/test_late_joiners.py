"""Who comes late, or comes back, catches up from another worker when no trainer is there, and nobody restarts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from support.pools.late import (
    check_equal,
    is_waiting,
    joined,
    peers_transfers,
    publish,
    publish_and_leave,
    publisher,
    serve,
    version_of,
    weights,
)
from support.pools.pool import eventually

from rolloutmq.messages import connect
from rolloutmq.ops.status import pool_state
from rolloutmq.sync.transfer.ledger import Ledger
from rolloutmq.sync.transfer.order import TransferOrder, TransferReport
from rolloutmq.worker.scripted.engine import ScriptedEngine
from rolloutmq.worker.weights.peer import Peer


@pytest.fixture
async def ledger(redis_db: str) -> AsyncIterator[Ledger]:
    async with connect(redis_db) as client:
        yield Ledger(client, "default")


async def test_a_worker_without_a_trainer_catches_up_from_another(redis_db: str, ledger: Ledger) -> None:
    async with joined(redis_db) as first:
        await publish_and_leave(redis_db, 1, 2)
        async with joined(redis_db) as late:
            await eventually(lambda: version_of(late) == 2)
            check_equal(late.engine, 2)
            assert await peers_transfers(ledger) == [(first.id, {late.id})]
            assert await ledger.wanted() == {}
            assert await ledger.committed() == 2
            await first.stop()
            assert await serve(redis_db, 2) == {(2,)}
            async with joined(redis_db) as later:  # what came from a peer can be handed on
                await eventually(lambda: version_of(later) == 2)
                check_equal(later.engine, 2)
                async with publisher(redis_db) as source:
                    assert (await publish(source, 3)).workers == tuple(sorted([late.id, later.id]))


async def test_of_several_that_could_help_one_does(redis_db: str, ledger: Ledger) -> None:
    async with joined(redis_db) as one, joined(redis_db) as two, joined(redis_db) as three:
        await publish_and_leave(redis_db, 1)
        async with joined(redis_db) as late, joined(redis_db) as later:
            await eventually(lambda: version_of(late) == version_of(later) == 1)
            found = await peers_transfers(ledger)
            assert set().union(*(served for _, served in found)) == {late.id, later.id}
            assert sum(len(served) for _, served in found) == 2
            assert {by for by, _ in found} <= {one.id, two.id, three.id}
            assert len(found) <= 2  # one after the other, if they came one after the other


async def test_a_live_trainer_is_not_helped(redis_db: str, ledger: Ledger) -> None:
    async with joined(redis_db, peer_after_s=60.0), publisher(redis_db) as source:
        await publish(source, 1)
        async with joined(redis_db) as late:
            await eventually(lambda: version_of(late) == 1)
        assert await peers_transfers(ledger) == []


@pytest.mark.slow
async def test_when_nobody_has_it_everybody_waits_and_says_so(redis_db: str, ledger: Ledger) -> None:
    async with joined(redis_db) as one, joined(redis_db) as two:
        await publish_and_leave(redis_db, 1)
        for running in (one, two):
            running.engine.kill()
        for running in (one, two):
            await eventually(lambda running=running: is_waiting(ledger, running))
        await eventually(lambda: said(redis_db, ledger, {one.id, two.id}))
        assert await peers_transfers(ledger) == []
        async with publisher(redis_db) as source:
            await publish(source, 2)
        assert await serve(redis_db, 2) == {(2,)}


async def said(url: str, ledger: Ledger, waiting: set[str]) -> bool:
    state = await pool_state(url, "default")
    return set(state["waiting_for_weights"]) == waiting and {w["state"] for w in state["workers"]} == {"syncing"}


class Held(ScriptedEngine):
    """Stops at a point of a peer's transfer until it is let go on."""

    def __init__(self, at: str = "", **more: Any) -> None:
        super().__init__(**more)
        self.at, self.reached, self.free = at, asyncio.Event(), asyncio.Event()
        self.sent: list[TransferReport] = []

    async def _here(self, at: str) -> None:
        if at == self.at:
            self.reached.set()
            await self.free.wait()

    async def send_weights(self, order: TransferOrder) -> TransferReport:
        await self._here("send")
        self.sent.append(await super().send_weights(order))
        return self.sent[-1]

    async def prepare_weights(self, order: TransferOrder) -> TransferReport:
        await self._here("prepare")
        return await super().prepare_weights(order)


async def test_a_peer_that_dies_while_it_sends_is_replaced(redis_db: str, ledger: Ledger) -> None:
    engines = Held("send"), Held("send")
    async with joined(redis_db, engine=engines[0]) as one, joined(redis_db, engine=engines[1]) as two:
        await publish_and_leave(redis_db, 1)
        async with joined(redis_db) as late:
            await eventually(lambda: any(engine.reached.is_set() for engine in engines))
            dying, other = (one, two) if engines[0].reached.is_set() else (two, one)
            other.engine.free.set()  # type: ignore[attr-defined]
            await dying.die()
            await eventually(lambda: version_of(late) == 1)
            check_equal(late.engine, 1)
            found = await peers_transfers(ledger)
            assert (found[0], found[-1]) == ((dying.id, set()), (other.id, {late.id}))
            assert version_of(other) == 1


async def test_a_joiner_that_dies_costs_the_others_nothing(redis_db: str, ledger: Ledger) -> None:
    dying = Held("prepare")
    async with joined(redis_db) as first:
        await publish_and_leave(redis_db, 1)
        async with joined(redis_db, engine=dying) as lost:
            await eventually(dying.reached.is_set)
            await lost.die()
            assert await serve(redis_db, 2) == {(1,)}  # the peer serves on
            async with joined(redis_db) as late:
                await eventually(lambda: version_of(late) == 1)
                check_equal(late.engine, 1)
            assert version_of(first) == 1
        assert await peers_transfers(ledger)


async def test_a_trainer_that_comes_back_goes_first(redis_db: str, ledger: Ledger) -> None:
    sender, slow = Held(), Held("prepare")
    async with joined(redis_db, engine=sender) as first:
        await publish_and_leave(redis_db, 1)
        async with joined(redis_db, engine=slow) as late, publisher(redis_db) as source:
            await eventually(slow.reached.is_set)
            handle = source.publish(2, weights(2).items())
            await eventually(lambda: sender.sent)
            assert not sender.sent[0].ok
            assert "version 2 is announced" in sender.sent[0].error
            slow.free.set()
            report = await asyncio.to_thread(handle.wait, 60)
            assert set(report.workers) == {first.id, late.id}
            for running in (first, late):
                check_equal(running.engine, 2)
                assert running.engine.starts == 1
        assert await serve(redis_db, 1) == {(2,)}


async def test_an_engine_that_cannot_send_says_why_and_is_left_alone_for_a_while(
    redis_db: str, ledger: Ledger, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    look, looks = Peer._look, []

    async def counted(self: Peer, worker_id: str, after_s: float) -> float:
        wait_s = await look(self, worker_id, after_s)
        looks.append(worker_id)
        return wait_s

    monkeypatch.setattr(Peer, "_look", counted)

    class Deaf(ScriptedEngine):
        asked = 0

        async def send_weights(self, order: TransferOrder) -> TransferReport:
            self.asked += 1
            return TransferReport(ok=False, phase="load", error="PlanImpossible: the engine does not hold x whole")

    engine = Deaf()
    async with joined(redis_db, engine=engine) as peer:
        await publish_and_leave(redis_db, 1)
        async with joined(redis_db) as late:
            await eventually(lambda: engine.asked and any("x whole" in r.message for r in caplog.records))
            await eventually(lambda: is_waiting(ledger, late))
            before = len(looks)
            await eventually(lambda: looks[before:].count(peer.id) >= 2)  # it sees that somebody waits
            assert engine.asked == 1
            async with joined(redis_db) as another, publisher(redis_db) as source:
                assert another.worker._status().state == "syncing"
                await publish(source, 2)
                assert await serve(redis_db, 1) == {(2,)}


async def test_a_worker_may_be_told_not_to_help(redis_db: str, ledger: Ledger) -> None:
    async with joined(redis_db, peer_after_s=None), joined(redis_db) as second:
        await publish_and_leave(redis_db, 1)
        async with joined(redis_db) as late:
            await eventually(lambda: version_of(late) == 1)
        assert {by for by, _ in await peers_transfers(ledger)} == {second.id}
