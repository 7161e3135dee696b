"""A version from the trainer to the engines: whole, verified, and told apart token by token."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.peers.publishing import publisher, weights
from support.pools.commanded import hurry
from support.pools.late import is_waiting
from support.pools.pool import Running, check_scripted, eventually, runs, wait_replies, worker
from support.specimens.messages import job

from rolloutmq import InvalidField, WaitTimeout, WeightPublisher
from rolloutmq.messages import Broker, RolloutResult, SamplingParams, WeightSyncError, connect
from rolloutmq.messages.broker import broker_of
from rolloutmq.sync.publish import Hub
from rolloutmq.sync.tensors import Snapshot
from rolloutmq.sync.transfer.ledger import Ledger
from rolloutmq.sync.transfer.order import TransferOrder, TransferReport
from rolloutmq.worker.scripted.engine import ScriptedEngine


async def publish(source: WeightPublisher, version: int, timeout: float = 20.0) -> Any:
    handle = source.publish(version, weights(version).items())
    return await asyncio.to_thread(handle.wait, timeout)


def check_equal(engine: ScriptedEngine, version: int) -> None:
    sent = weights(version)
    assert engine.weights.keys() == sent.keys()
    for name, tensor in sent.items():
        got = engine.weights[name]
        assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(got, tensor), name


@pytest.mark.parametrize("bucket_bytes", [2048, 1 << 28])
async def test_two_workers_get_every_bit(redis_db: str, ledger: Ledger, bucket_bytes: int) -> None:
    async with (
        worker(redis_db) as one,
        worker(redis_db) as two,
        publisher(redis_db, bucket_bytes=bucket_bytes) as source,
    ):
        for version in (1, 2, 7):
            report = await publish(source, version)
            assert report.state == "committed"
            assert set(report.workers) == {one.id, two.id}
            assert report.failures == {}
            assert not report.readback  # the scripted engine has no parameters that could be read
            assert report.nbytes == sum(t.numel() * t.element_size() for t in weights(version).values())
            for running in (one, two):
                check_equal(running.engine, version)
                assert running.generation.version == version
            assert await ledger.committed() == version
            assert await ledger.version_state(version) == "committed"


class Reading(ScriptedEngine):
    """Says that it compared what it holds."""

    async def commit_weights(self, order: TransferOrder) -> TransferReport:
        return replace(await super().commit_weights(order), readback=True)


async def test_a_version_is_read_back_if_every_worker_did(redis_db: str) -> None:
    async with worker(redis_db, engine=Reading()), publisher(redis_db) as source:
        assert (await publish(source, 1)).readback
        async with worker(redis_db):
            report = await publish(source, 2)
            assert (len(report.workers), report.readback) == (2, False)


def mixed(results: list[RolloutResult]) -> list[RolloutResult]:
    return [one for one in results if len(one.segments) > 1]


async def results_of(url: str, count: int, timeout: float = 30.0) -> list[RolloutResult]:
    async with connect(url, pool="default") as client:
        found = [reply.outcome for reply in await wait_replies(broker_of(client, "default"), count, timeout=timeout)]
    assert all(isinstance(one, RolloutResult) for one in found)
    return [one for one in found if isinstance(one, RolloutResult)]


async def enqueue(url: str, count: int, new_tokens: int) -> None:
    async with connect(url, pool="default") as client:
        await broker_of(client, "default").enqueue(
            [job(sampling=SamplingParams(max_new_tokens=new_tokens)) for _ in range(count)]
        )


async def all_have_tokens_of(broker: Broker, workers: list[Running], version: int) -> bool:
    """Whether each of 8 samples goes on under this version, or is done."""
    going_on = [
        name
        for running in workers
        for name in running.engine.ops.generated()
        if running.generation.in_flight.running[name].newest == version
    ]
    return len(going_on) + await broker.count_replies("client") == 8


async def test_resume_every_token_is_of_the_version_its_segment_says(redis_db: str, broker: Broker) -> None:
    engines = [ScriptedEngine(tokens_per_s=150), ScriptedEngine(tokens_per_s=150)]
    async with (
        worker(redis_db, engine=engines[0], max_running=4) as first,
        worker(redis_db, engine=engines[1], max_running=4) as second,
        publisher(redis_db, mode="resume") as source,
    ):
        await enqueue(redis_db, 8, 6000)  # they run until `hurry`
        await eventually(lambda: first.generation.running + second.generation.running == 8)
        for version in (1, 2, 3):
            assert (await publish(source, version)).state == "committed"
            await eventually(lambda version=version: all_have_tokens_of(broker, [first, second], version))
        hurry(first)
        hurry(second)
        results = await results_of(redis_db, 8)
    assert len(mixed(results)) == 8
    for one in results:
        check_scripted(one, 3)
        assert sum(segment.tokens for segment in one.segments) == 6000
        assert list(one.versions) == sorted(set(one.versions))
        assert one.attempt == 1


async def test_drain_no_sample_mixes_versions(redis_db: str) -> None:
    engine = ScriptedEngine(tokens_per_s=100)
    async with (
        worker(redis_db, engine=engine, max_running=4, prefetch=0),
        publisher(redis_db, mode="drain") as source,
    ):
        await enqueue(redis_db, 16, 20)
        await eventually(lambda: runs(engine))
        assert (await publish(source, 1)).state == "committed"
        await enqueue(redis_db, 4, 20)
        results = await results_of(redis_db, 20)
    for one in results:
        check_scripted(one, 3)
        assert len(one.segments) == 1
    assert {one.versions[0] for one in results} == {0, 1}


async def test_drain_who_cannot_finish_in_time_stays_on_the_old(redis_db: str) -> None:
    engine = ScriptedEngine(tokens_per_s=10)
    async with (
        worker(redis_db, engine=engine, drain_s=0.0) as running,
        publisher(redis_db, mode="drain", join_timeout_s=1.5) as source,
    ):
        await enqueue(redis_db, 1, 1000)
        await eventually(lambda: runs(engine))
        report = await publish(source, 1)
        assert report.state == "failed"
        assert report.failures == {running.id: "load: what was running did not end in the time the trainer gives"}
        assert await runs(engine)  # and it still generates
        assert running.generation.version == 0


async def test_a_late_joiner_serves_only_after_its_first_verified_sync(redis_db: str) -> None:
    async with publisher(redis_db) as source:
        report = await publish(source, 4)  # nobody is there: those who come catch up
        assert (report.state, report.workers) == ("committed", ())
        await enqueue(redis_db, 5, 3)
        async with worker(redis_db) as first:
            results = await results_of(redis_db, 5)
            assert all(one.versions == (4,) for one in results)
            check_equal(first.engine, 4)
            slow = ScriptedEngine(tokens_per_s=1e6)
            async with worker(redis_db, engine=slow) as late:
                await eventually(lambda: late.generation.version == 4)
                check_equal(slow, 4)
                assert first.generation.version == 4
                assert (await publish(source, 5)).workers == tuple(sorted([first.id, late.id]))


async def test_without_a_publisher_a_late_joiner_does_not_serve(redis_db: str, ledger: Ledger, broker: Broker) -> None:
    async with publisher(redis_db) as source:
        await publish(source, 1)
    async with worker(redis_db) as late:
        await eventually(lambda: is_waiting(ledger, late))
        await enqueue(redis_db, 1, 3)
        assert late.status.state == "syncing"
        assert await broker.count_replies("client") == 0
        async with publisher(redis_db) as source:
            assert source.last_version == 1  # continues from the ledger
            with pytest.raises(InvalidField, match="version=1: an integer above 1"):
                source.publish(1, weights(1).items())
            assert (await publish(source, 2)).workers == (late.id,)
            assert [one.versions for one in await results_of(redis_db, 1)] == [(2,)]
            assert not await is_waiting(ledger, late)


async def test_an_engine_that_restarts_catches_up(redis_db: str) -> None:
    async with worker(redis_db) as running, publisher(redis_db) as source:
        await publish(source, 3)
        running.engine.weights = {}
        running.engine.kill()
        await eventually(lambda: running.engine.starts == 2)
        await enqueue(redis_db, 2, 3)
        assert {one.versions for one in await results_of(redis_db, 2)} == {(3,)}
        check_equal(running.engine, 3)


async def test_versions_only_go_up(redis_db: str) -> None:
    async with publisher(redis_db) as source:
        await publish(source, 2)
        for version in (2, 1, 0, -1, True, 2.5, "3"):
            with pytest.raises(InvalidField, match="version="):
                source.publish(version, weights(1).items())  # type: ignore[arg-type]
        assert (await publish(source, 3)).state == "committed"
        with pytest.raises(InvalidField, match="every name once"):
            source.publish(4, [("a", torch.ones(1))] * 2)
        assert (await publish(source, 4)).state == "committed"


async def test_a_version_that_waits_is_superseded_by_a_newer(redis_db: str, gate: Gate) -> None:
    async with worker(redis_db) as running, publisher(redis_db) as source:
        gate.close()
        handles = [source.publish(version, weights(version).items()) for version in (1,)]
        await asyncio.to_thread(gate.entered.wait, 5)
        handles += [source.publish(version, weights(version).items()) for version in (2, 3)]
        with pytest.raises(WaitTimeout, match="version 3"):
            handles[2].wait(0.01)
        gate.open()
        reports = [await asyncio.to_thread(handle.wait, 60) for handle in handles]
        assert [report.state for report in reports] == ["committed", "superseded", "committed"]
        check_equal(running.engine, 3)


async def test_closing_finishes_what_was_published(redis_db: str) -> None:
    async with worker(redis_db) as running:
        async with publisher(redis_db) as source:
            handle = source.publish(1, weights(1).items())
        assert handle.done()
        assert handle.wait(0).state == "committed"
        check_equal(running.engine, 1)
        with pytest.raises(WeightSyncError, match="closed"):
            source.publish(2, weights(2).items())


async def test_torchruns_environment_does_not_matter(redis_db: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"):
        monkeypatch.setenv(name, "5")
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    async with worker(redis_db) as running, publisher(redis_db) as source:
        assert (await publish(source, 1)).workers == (running.id,)


class Gate:
    """Holds the digests of a publication up."""

    def __init__(self) -> None:
        import threading  # noqa: PLC0415

        self.entered, self._free = threading.Event(), threading.Event()
        self._free.set()

    def close(self) -> None:
        self._free.clear()

    def open(self) -> None:
        self._free.set()

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any) -> Any:
            self.entered.set()
            assert self._free.wait(20)
            return call(*args)

        return wrapped


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    from rolloutmq.sync.packing.packing import PackedWeights  # noqa: PLC0415

    made = Gate()
    monkeypatch.setattr(PackedWeights, "snapshot", made.around(PackedWeights.snapshot))
    yield made
    made.open()


async def test_a_closed_publisher_keeps_no_version(redis_db: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU each is a copy of the model, and nothing there makes Python look for cycles."""
    offer, sent = Hub.offer, []

    def offered(hub: Hub, snapshot: Snapshot, *told: Any) -> Any:
        sent.append(weakref.ref(snapshot.buckets[0]))
        return offer(hub, snapshot, *told)

    monkeypatch.setattr(Hub, "offer", offered)
    gc.disable()
    try:
        async with worker(redis_db), publisher(redis_db) as source:
            for version in (1, 2):
                assert (await publish(source, version)).state == "committed"
        assert [here() for here in sent] == [None, None]
    finally:
        gc.enable()
