"""A worker follows the ledger also while Redis fails it: it joins later, and generation waits for no answer."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from redis.exceptions import ConnectionError as RedisGone
from support.peers.publishing import publish, publisher
from support.pools.late import joined, publish_and_leave, version_of
from support.pools.pool import check_scripted, eventually, wait_replies, worker
from support.specimens.messages import job

from rolloutmq.messages import Broker, RolloutResult, SamplingParams, connect
from rolloutmq.messages.model.weights import UpdateMode
from rolloutmq.sync.transfer.ledger import Join, Ledger
from rolloutmq.worker.scripted.engine import ScriptedEngine
from rolloutmq.worker.weights import peer

NEVER_S = 600.0


@pytest.fixture
async def ledger(redis_db: str) -> AsyncIterator[Ledger]:
    async with connect(redis_db, pool="default") as client:
        yield Ledger(client, "default")


@pytest.mark.parametrize("call", ["epoch", "join"])
async def test_a_transfer_is_joined_after_a_redis_error(
    redis_db: str, ledger: Ledger, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """The sender waits for this worker as long as it lives, so the worker looks again."""
    failed: list[int] = []
    original = Ledger.join if call == "join" else Ledger.epoch

    async def failing(self: Ledger, number: int, *who: str | Join) -> object:
        ours = running.worker._follower is not None and self is running.worker._follower._ledger
        if ours and not failed:
            failed.append(number)
            raise RedisGone("gone for a moment")
        return await original(self, number, *who)  # type: ignore[arg-type]

    patient = publisher(redis_db, join_timeout_s=NEVER_S, transfer_timeout_s=NEVER_S)
    async with worker(redis_db) as running, patient as source:
        monkeypatch.setattr(Ledger, call, failing)
        report = await publish(source, 1)
        assert (report.state, report.workers, failed) == ("committed", (running.id,), [1])


@pytest.mark.parametrize("mode", ["resume", "in_place", "drain"])
async def test_redis_is_not_waited_for_while_generation_stands_still(
    redis_db: str, broker: Broker, monkeypatch: pytest.MonkeyPatch, mode: UpdateMode
) -> None:
    """An answer of Redis that comes only when generation goes on again is not needed for that."""
    open_epoch = Ledger.open_epoch

    async def slow(self: Ledger) -> int:
        await running.worker._generation.gate.opened()
        return await open_epoch(self)

    engine = ScriptedEngine(tokens_per_s=400)
    patient = publisher(redis_db, mode=mode, join_timeout_s=NEVER_S, transfer_timeout_s=NEVER_S)
    async with worker(redis_db, engine=engine) as running, patient as source:
        await broker.enqueue([job(sampling=SamplingParams(max_new_tokens=200))])
        await eventually(lambda: running.worker._generation.running)
        monkeypatch.setattr(Ledger, "open_epoch", slow)
        report = await publish(source, 1)
        assert (report.state, report.workers) == ("committed", (running.id,))
        (reply,) = await wait_replies(broker, 1)
        assert isinstance(reply.outcome, RolloutResult)
        check_scripted(reply.outcome, 3)


async def test_a_peer_whose_store_fails_serves_on(
    redis_db: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    open_store = peer._Lender.open

    class Failing:
        def __init__(self, store: object) -> None:
            self.port, self._kept = store.port, store  # type: ignore[attr-defined]

        def set(self, key: str, value: str) -> None:
            raise RuntimeError("recvValue failed")

    async def opened(self: peer._Lender, redis_url: str) -> None:
        await open_store(self, redis_url)
        self._store = Failing(self._store)

    monkeypatch.setattr(peer._Lender, "open", opened)
    async with joined(redis_db) as first:
        await publish_and_leave(redis_db, 1)
        async with joined(redis_db) as late:
            await eventually(lambda: version_of(late) == 1)
            await eventually(lambda: any("its store does not answer" in one.message for one in caplog.records))
            assert not first.task.done()
            assert first.worker._status().state == "serving"
