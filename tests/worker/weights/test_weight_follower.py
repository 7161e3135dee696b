"""A worker follows the ledger also while Redis fails it: it joins later, and generation waits for no answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from redis.exceptions import ConnectionError as RedisGone
from support.peers.publishing import WEIGHTS, publish, publisher
from support.pools.fixtures import MakeLease
from support.pools.late import publish_and_leave, version_of
from support.pools.pool import check_scripted, eventually, wait_replies, worker
from support.specimens.messages import job

from rolloutmq.messages import Broker, Lease, SamplingParams
from rolloutmq.messages.model.weights import UpdateMode, WeightAnnouncement
from rolloutmq.sync.transfer.ledger import Ledger
from rolloutmq.worker.scripted.engine import ScriptedEngine

NEVER_S = 600.0


@pytest.mark.parametrize("call", ["heading", "announced", "report"])
async def test_a_transfer_under_way_is_joined_after_a_redis_error(
    redis_db: str,
    ledger: Ledger,
    joined: MakeLease,
    expire_lease: Callable[[Lease], Awaitable[None]],
    *,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
) -> None:
    """Who missed the bell reads the ledger, and looks again: the transfer is open as long as somebody is waited for."""
    failed: list[str] = []
    original = getattr(Ledger, call)

    async def failing(self: Ledger, *told: object) -> object:
        if not failed:
            failed.append(call)
            raise RedisGone("gone for a moment")
        return await original(self, *told)

    phantom = await joined("phantom", lease_s=NEVER_S)
    async with publisher(redis_db, join_timeout_s=NEVER_S, transfer_timeout_s=NEVER_S) as source:
        handle = source.publish(1, WEIGHTS.items())
        await eventually(ledger.open_epoch)
        monkeypatch.setattr(Ledger, call, failing)
        async with worker(redis_db) as running:
            await eventually(ledger.committed)
            await expire_lease(phantom)
            report = await asyncio.to_thread(handle.wait, 60)
            assert (report.state, report.workers, failed) == ("committed", (running.id,), [call])
            assert report.failures == {"phantom": "was lost: its lease is over"}


@pytest.mark.parametrize("mode", ["resume", "in_place", "drain"])
async def test_redis_is_not_waited_for_while_generation_stands_still(
    redis_db: str, broker: Broker, monkeypatch: pytest.MonkeyPatch, mode: UpdateMode
) -> None:
    """An answer of Redis that comes only when generation goes on again is not needed for that."""
    goes_on = Ledger.goes_on

    async def slow(self: Ledger, told: WeightAnnouncement) -> bool:
        await running.generation.gate.opened()
        return await goes_on(self, told)

    engine = ScriptedEngine(tokens_per_s=400)
    patient = publisher(redis_db, mode=mode, join_timeout_s=NEVER_S, transfer_timeout_s=NEVER_S)
    async with worker(redis_db, engine=engine) as running, patient as source:
        await broker.enqueue([job(sampling=SamplingParams(max_new_tokens=200))])
        await eventually(lambda: running.generation.running)
        monkeypatch.setattr(Ledger, "goes_on", slow)
        report = await publish(source, 1)
        assert (report.state, report.workers) == ("committed", (running.id,))
        (reply,) = await wait_replies(broker, 1)
        check_scripted(reply.outcome, 3)


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n", b"?" + b"\xff" * 8, b"?" + bytes(7) + b"\x03\xc1\xc1\xc1"])
async def test_whoever_offers_its_version_serves_on_whatever_is_said_to_it(
    redis_db: str, ledger: Ledger, said: bytes
) -> None:
    async with worker(redis_db) as first:
        await publish_and_leave(redis_db, 1)
        _, (holder,) = await ledger.holders(1)
        reader, writer = await asyncio.open_connection(*holder.address.rsplit(":", 1))
        writer.write(said)
        async with asyncio.timeout(30):
            assert await reader.read() == b""  # it hangs up
        writer.close()
        async with worker(redis_db) as late:
            await eventually(lambda: version_of(late) == 1)
        assert not first.task.done()
        assert first.status.state == "serving"
