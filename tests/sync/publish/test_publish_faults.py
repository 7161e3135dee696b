"""Transfers that go wrong: the old version goes on, the report says why, and nothing waits for ever."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from contextlib import AsyncExitStack
from typing import Any

import pytest
import torch
from redis.exceptions import ConnectionError as RedisGone
from support.peers.publishing import WEIGHTS, publish, publisher, serve_some
from support.pools.pool import eventually, status, worker

from rolloutmq.messages import Lease, TensorSpec, WeightAnnouncement, WeightManifest, WeightSyncError
from rolloutmq.sync.publish.hub import Hub, Outgoing
from rolloutmq.sync.tensors.snapshot import Snapshot
from rolloutmq.sync.transfer.ledger import Epoch, Ledger
from rolloutmq.sync.transfer.order import SENDER_GONE, TransferOrder, TransferReport
from rolloutmq.sync.wire import Lines
from rolloutmq.worker.scripted.engine import ScriptedEngine

NEVER_S = 600.0
"""A timeout that a test does not live to see: what waits for it fails."""


def altered(snapshot: Snapshot, how: str) -> Snapshot:
    """What a broken trainer, network or memory makes of a snapshot."""
    buckets, tensors = list(snapshot.buckets), list(snapshot.manifest.tensors)
    if how == "bit":
        place = tensors[1]
        buckets[place.bucket] = buckets[place.bucket].clone()
        buckets[place.bucket][place.offset + 2] ^= 1
    elif how == "shape":
        tensors[1] = TensorSpec(**(tensors[1].model_dump() | {"shape": (6,)}))
    elif how == "outside":
        tensors[1] = TensorSpec(**(tensors[1].model_dump() | {"offset": 1 << 30}))
    manifest = snapshot.manifest
    version = manifest.version + (how == "version")
    return Snapshot(
        WeightManifest(version=version, bucket_nbytes=manifest.bucket_nbytes, tensors=tuple(tensors)), tuple(buckets)
    )


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("bit", "receive: DigestMismatch: tensor second: digest"),
        ("shape", "rendezvous: TransferTimeout: no manifest of version 2: "),
        ("outside", "receive: InvalidField: second="),
        ("version", "rendezvous: TransferTimeout: no manifest of version 2: "),
    ],
)
async def test_what_is_not_what_was_sent_is_refused(
    redis_db: str, ledger: Ledger, monkeypatch: pytest.MonkeyPatch, how: str, said: str
) -> None:
    newer = {name: tensor + 1 for name, tensor in WEIGHTS.items()}  # what is there already is not taken again
    async with worker(redis_db) as running, publisher(redis_db) as source:
        assert (await publish(source, 1)).state == "committed"
        old = {name: tensor.clone() for name, tensor in running.engine.weights.items()}
        offer = Hub.offer

        def offer_altered(self: Hub, snapshot: Snapshot, *more: Any) -> Outgoing:
            return offer(self, altered(snapshot, how), *more)

        monkeypatch.setattr(Hub, "offer", offer_altered)
        report = await asyncio.to_thread(source.publish(2, newer.items()).wait, 60)
        assert report.state == "failed"
        assert report.workers == ()
        assert report.failures[running.id].startswith(said)
        assert running.engine.weights.keys() == old.keys()
        assert all(torch.equal(running.engine.weights[name], tensor) for name, tensor in old.items())
        assert running.generation.version == 1
        assert await ledger.committed() == 1
        assert await ledger.version_state(2) == "failed"
        await serve_some(ledger, 0, 1)
        monkeypatch.setattr(Hub, "offer", offer)
        assert (await publish(source, 3)).state == "committed"
        await serve_some(ledger, 1, 3)


async def test_of_several_that_get_wrong_bytes_nobody_waits_for_another(
    redis_db: str, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is sent to the others, who will never have that bucket either."""
    async with AsyncExitStack() as stack:
        pool = [await stack.enter_async_context(worker(redis_db)) for _ in range(5)]
        source = await stack.enter_async_context(publisher(redis_db, bucket_bytes=32))
        offer = Hub.offer

        def offer_altered(self: Hub, snapshot: Snapshot, *more: Any) -> Outgoing:
            return offer(self, altered(snapshot, "bit"), *more)

        monkeypatch.setattr(Hub, "offer", offer_altered)
        report = await publish(source, 1)
        monkeypatch.setattr(Hub, "offer", offer)
        assert (report.state, report.failures.keys()) == ("failed", {running.id for running in pool})
        said = "receive: DigestMismatch: tensor second: digest"
        assert all(why.startswith(said) for why in report.failures.values()), report.failures
        report = await publish(source, 2)
        assert (report.state, len(report.workers)) == ("committed", len(pool))
        assert {running.engine.starts for running in pool} == {1}


async def join_as(phantom: str, ledger: Ledger) -> Lines:
    """Join the open transfer at its sender, as an engine does, and take nothing."""
    told = await ledger.announced(await eventually(ledger.open_epoch))
    assert told is not None
    lines = Lines(None, 0, 1)
    lines.newest = order = TransferOrder.of_announcement(told, phantom)
    await asyncio.to_thread(lines.join, order, time.monotonic() + 30, cuda=False, gpu="", nccl="")
    return lines


async def test_a_worker_that_joins_and_dies(redis_db: str, ledger: Ledger) -> None:
    """Its lease lasts, but its connection is closed: the others get the version without it."""
    phantom = Lease(ledger.redis, "default", "phantom", lease_s=NEVER_S)
    patient = publisher(redis_db, join_timeout_s=NEVER_S, transfer_timeout_s=NEVER_S)
    async with worker(redis_db) as one, worker(redis_db) as two, patient as source:
        await phantom.join(status("phantom"))
        handle = source.publish(1, WEIGHTS.items())
        lines = await join_as("phantom", ledger)
        assert not handle.done()
        lines.leave()
        report = await asyncio.to_thread(handle.wait, 60)
        assert (report.state, set(report.workers)) == ("committed", {one.id, two.id})
        assert report.failures == {"phantom": "was lost: its connection is closed"}
        for running in (one, two):
            assert running.engine.weights.keys() == WEIGHTS.keys()
            assert running.engine.starts == 1
        await serve_some(ledger, 0, 1)
        await phantom.leave()
        again = await publish(source, 2)
        assert (again.state, set(again.workers), again.failures) == ("committed", {one.id, two.id}, {})
        await serve_some(ledger, 1, 2)


async def test_a_worker_that_joins_and_then_only_breathes(redis_db: str, ledger: Ledger) -> None:
    """It answers all the time, and takes nothing: its deadline ends that, and the others have served meanwhile."""
    phantom = Lease(ledger.redis, "default", "phantom", lease_s=NEVER_S)
    async with worker(redis_db) as one, worker(redis_db) as two, publisher(redis_db, transfer_timeout_s=2.5) as source:
        await phantom.join(status("phantom"))
        handle = source.publish(1, WEIGHTS.items())
        lines = await join_as("phantom", ledger)
        await eventually(ledger.committed)
        await serve_some(ledger, 0, 1)
        report = await asyncio.to_thread(handle.wait, 60)
        lines.leave()
        assert (report.state, set(report.workers)) == ("committed", {one.id, two.id})
        assert report.failures == {"phantom": "did not report in time"}


async def test_a_worker_that_is_dead_before_it_joins_costs_nothing(
    redis_db: str, ledger: Ledger, expire_lease: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ledger cannot be read for a moment meanwhile: the sender looks again."""
    dead = Lease(ledger.redis, "default", "dead", lease_s=NEVER_S)
    epoch, failed = Ledger.epoch, list[int]()

    async def failing(self: Ledger, number: int) -> Epoch | None:
        if not failed:
            failed.append(number)
            raise RedisGone("gone for a moment")
        return await epoch(self, number)

    async with worker(redis_db) as running, publisher(redis_db, join_timeout_s=NEVER_S) as source:
        await dead.join(status("dead"))
        monkeypatch.setattr(Ledger, "epoch", failing)
        handle = source.publish(1, WEIGHTS.items())
        await eventually(lambda: failed == [1])
        await expire_lease(dead)
        report = await asyncio.to_thread(handle.wait, 60)
        assert (report.state, report.workers) == ("committed", (running.id,))
        assert report.failures == {"dead": "was lost: its lease is over"}


async def test_one_refuses_and_the_other_serves(redis_db: str, ledger: Ledger) -> None:
    class Picky(ScriptedEngine):
        refuse = True

        async def prepare_weights(self, order: TransferOrder) -> TransferReport:
            report = await super().prepare_weights(order)
            return TransferReport(False, "verify", "DigestMismatch: tensor first") if self.refuse else report

    picky = Picky()
    async with worker(redis_db) as sound, worker(redis_db, engine=picky) as other, publisher(redis_db) as source:
        report = await publish(source, 1)
        assert report.state == "committed"
        assert report.workers == (sound.id,)
        assert report.failures == {other.id: "verify: DigestMismatch: tensor first"}
        assert other.generation.version == 0
        picky.refuse = False
        # it is behind what was committed, and takes it by itself
        await eventually(lambda: other.generation.version == 1)
        assert picky.weights.keys() == WEIGHTS.keys()
        assert sound.generation.version == 1


@pytest.mark.parametrize(
    ("error", "waits"),
    [
        ("DigestMismatch: not the tensors of this model: unknown ['first']", False),
        ("TransferTimeout: nobody answers at 192.0.2.1:1", True),
    ],
)
async def test_who_never_comes_keeps_nobody_from_the_version(redis_db: str, error: str, waits: bool) -> None:
    """Another model, or no way to the trainer's port: it tries every transfer all the same."""
    timeout_s = 2.5

    class Stranger(ScriptedEngine):
        async def prepare_weights(self, order: TransferOrder) -> TransferReport:
            if waits:
                await asyncio.sleep(order.timeout_s)
            return TransferReport(False, "rendezvous", error)

    async with (
        worker(redis_db) as one,
        worker(redis_db) as two,
        worker(redis_db, engine=Stranger()) as other,
        publisher(redis_db, transfer_timeout_s=timeout_s) as source,
    ):
        report = await publish(source, 1)
        assert (report.state, set(report.workers)) == ("committed", {one.id, two.id})
        assert report.failures == {other.id: "did not report in time" if waits else f"rendezvous: {error}"}
        assert other.generation.version == 0
        async with worker(redis_db) as late:  # the stranger tries to catch up, too
            await eventually(lambda: late.generation.version == 1)


async def test_who_gives_a_living_trainer_up_tries_again(redis_db: str) -> None:
    """The trainer was silent for a while: one worker has given it up, and tries again while the transfer goes on."""

    class Hasty(ScriptedEngine):
        left = 0

        async def prepare_weights(self, order: TransferOrder) -> TransferReport:
            if self.left:
                return await super().prepare_weights(order)
            self.left += 1
            error = f"TransferTimeout: no manifest: {SENDER_GONE}: no answer within 3.0 s"
            return TransferReport(False, "rendezvous", error)

    patient = publisher(redis_db, transfer_timeout_s=NEVER_S)
    async with worker(redis_db) as one, worker(redis_db, engine=Hasty()) as other, patient as source:
        report = await publish(source, 1)
        assert (report.state, set(report.workers), report.failures) == ("committed", {one.id, other.id}, {})


async def reported(ledger: Ledger, epoch: int, worker_id: str) -> TransferReport | None:
    found = await ledger.epoch(epoch)
    return found.reports.get(worker_id) if found is not None else None


@pytest.mark.parametrize("listens", [False, True])
async def test_the_publisher_dies_after_the_announcement(redis_db: str, ledger: Ledger, listens: bool) -> None:
    """Nobody listens at its port, or nobody answers there: the worker says so, and is free for the next publisher."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        announcement = WeightAnnouncement(
            version=1,
            epoch=await ledger.new_epoch(),
            host="127.0.0.1",
            port=silent.getsockname()[1] if listens else 1,
            token="t",
            join_timeout_s=0.5,
            transfer_timeout_s=1.0,
        )
        async with worker(redis_db) as running:
            await ledger.announce(announcement)
            await serve_some(ledger, 0, 0)
            report = await eventually(lambda: reported(ledger, announcement.epoch, running.id))
            assert (report.ok, report.phase, report.intact) == (False, "rendezvous", True)
            assert (SENDER_GONE if listens else "nobody answers at 127.0.0.1:1") in report.error
            assert not running.generation.state.updating
            await serve_some(ledger, 1, 0)
            async with publisher(redis_db, join_timeout_s=NEVER_S) as source:
                assert (await publish(source, 2)).state == "committed"
            await serve_some(ledger, 2, 2)


async def test_what_is_over_stays_over(ledger: Ledger) -> None:
    told = WeightAnnouncement(
        version=1, epoch=await ledger.new_epoch(), host="h", port=1, join_timeout_s=1.0, transfer_timeout_s=1.0
    )
    assert await ledger.announced(told.epoch) is None
    await ledger.announce(told)
    assert (await ledger.announced(told.epoch), await ledger.open_epoch()) == (told, told.epoch)
    assert await ledger.close(told, committed=True, holder=None, lost={})
    await ledger.announce(told)  # a delayed copy
    assert await ledger.close(told, committed=False, holder=None, lost={})  # a committed version never goes back
    assert await ledger.version_state(1) == "committed"
    assert (await ledger.announced(told.epoch), await ledger.open_epoch()) == (None, 0)


async def test_redis_emptied_under_a_transfer(redis_db: str, ledger: Ledger) -> None:
    phantom = Lease(ledger.redis, "default", "phantom")
    await phantom.join(status("phantom"))
    async with publisher(redis_db) as source:
        handle = source.publish(1, WEIGHTS.items())
        await eventually(ledger.open_epoch)
        await ledger.redis.flushall()
        # "vanished from the ledger", or no live worker is left: it depends on what the sender was reading
        with contextlib.suppress(WeightSyncError):
            assert (await asyncio.to_thread(handle.wait, 60)).state == "failed"
        assert (await publish(source, 2)).state == "committed"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
async def test_a_version_that_is_not_finite_is_not_sent_unless_it_may_be(
    redis_db: str, ledger: Ledger, value: float
) -> None:
    broken = WEIGHTS | {"third": torch.tensor([0.0, value, 0.0])}
    async with worker(redis_db) as running:
        async with publisher(redis_db) as source:
            assert (await publish(source, 1)).state == "committed"
            report = await asyncio.to_thread(source.publish(2, broken).wait, 60)
            assert (report.state, report.workers, set(report.failures)) == ("failed", (), {"trainer"})
            assert "tensor third has NaN or Inf" in report.failures["trainer"]
            assert await ledger.committed() == running.generation.version == 1
        async with publisher(redis_db, nonfinite="allow") as source:
            assert (await asyncio.to_thread(source.publish(3, broken).wait, 60)).workers == (running.id,)
            assert running.engine.weights["third"].tolist()[0] == 0.0
            assert not running.engine.weights["third"].isfinite().all()
