"""Transfers that go wrong: the old version goes on, the report says why, and nothing waits for ever."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch
from support.peers.publishing import WEIGHTS, publish, publisher, serve_some
from support.pools.pool import eventually, status, worker

from rolloutmq.messages import Lease, TensorSpec, WeightAnnouncement, WeightManifest, WeightSyncError, connect
from rolloutmq.sync.publish.sender import Sender
from rolloutmq.sync.tensors.snapshot import Snapshot
from rolloutmq.sync.transfer.ledger import Join, Ledger
from rolloutmq.sync.transfer.order import SENDER_GONE, TransferOrder, TransferReport
from rolloutmq.sync.wire.broadcaster import Broadcaster
from rolloutmq.sync.wire.store import serve_store
from rolloutmq.worker.scripted.engine import ScriptedEngine

NEVER_S = 600.0
"""A timeout that a test does not live to see: what waits for it fails."""


@pytest.fixture
async def ledger(redis_db: str) -> AsyncIterator[Ledger]:
    async with connect(redis_db) as client:
        yield Ledger(client, "default")


def altered(snapshot: Snapshot, how: str) -> Snapshot:
    """What a broken trainer, network or memory makes of a snapshot."""
    buckets, tensors = list(snapshot.buckets), list(snapshot.manifest.tensors)
    if how == "bit":
        place = tensors[1]
        buckets[place.bucket] = buckets[place.bucket].clone()
        buckets[place.bucket][place.offset + 2] ^= 1
    elif how == "swapped":
        first, third = tensors[0], tensors[2]
        tensors[0] = TensorSpec(**(first.model_dump() | {"digest": third.digest}))
        tensors[2] = TensorSpec(**(third.model_dump() | {"digest": first.digest}))
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
        ("bit", "verify: DigestMismatch: tensor second: digest"),
        ("swapped", "verify: DigestMismatch: tensor first: digest"),
        ("shape", "verify: InvalidField: second="),
        ("outside", "verify: InvalidField: second="),
        ("version", "rendezvous: DigestMismatch: the manifest is of version 3, 2 was announced"),
    ],
)
async def test_what_is_not_what_was_sent_is_refused(
    redis_db: str, ledger: Ledger, monkeypatch: pytest.MonkeyPatch, how: str, said: str
) -> None:
    async with worker(redis_db) as running, publisher(redis_db) as source:
        assert (await publish(source, 1)).state == "committed"
        old = {name: tensor.clone() for name, tensor in running.engine.weights.items()}
        offer, send = Broadcaster.offer, Broadcaster.send

        def offer_altered(self: Broadcaster, epoch: int, snapshot: Snapshot) -> None:
            offer(self, epoch, altered(snapshot, how))

        def send_altered(self: Broadcaster, snapshot: Snapshot, *more: Any) -> None:
            send(self, altered(snapshot, how), *more)

        monkeypatch.setattr(Broadcaster, "offer", offer_altered)
        monkeypatch.setattr(Broadcaster, "send", send_altered)
        report = await publish(source, 2)
        assert report.state == "failed"
        assert report.workers == ()
        assert report.failures[running.id].startswith(said)
        assert running.engine.weights.keys() == old.keys()
        assert all(torch.equal(running.engine.weights[name], tensor) for name, tensor in old.items())
        assert running.worker._generation.version == 1
        assert await ledger.committed() == 1
        assert await ledger.version_state(2) == "failed"
        await serve_some(ledger, 0, 1)
        monkeypatch.setattr(Broadcaster, "offer", offer)
        monkeypatch.setattr(Broadcaster, "send", send)
        assert (await publish(source, 3)).state == "committed"
        await serve_some(ledger, 1, 3)


async def test_a_worker_that_dies_between_joining_and_meeting(redis_db: str, ledger: Ledger, expire_lease: Any) -> None:
    """It joins and is never heard of again: its lease ends, and the others get the version without it."""
    phantom = Lease(ledger.redis, "default", "phantom")
    patient = publisher(redis_db, transfer_timeout_s=NEVER_S)
    async with worker(redis_db) as one, worker(redis_db) as two, patient as source:
        await phantom.join(status("phantom"))
        handle = source.publish(1, WEIGHTS.items())
        number = await eventually(ledger.open_epoch)
        assert await ledger.join(number, "phantom", Join(1))
        await eventually(lambda: sealed(ledger, number))
        await expire_lease(phantom)
        report = await asyncio.to_thread(handle.wait, 60)
        assert (report.state, set(report.workers)) == ("committed", {one.id, two.id})
        assert set(report.failures) == {"phantom"}
        assert report.failures["phantom"].startswith("was lost during the transfer")
        for running in (one, two):
            assert running.engine.weights.keys() == WEIGHTS.keys()
            assert running.engine.starts == 1
        await serve_some(ledger, 0, 1)
        again = await publish(source, 2)
        assert (again.state, set(again.workers), again.failures) == ("committed", {one.id, two.id}, {})
        await serve_some(ledger, 1, 2)


async def sealed(ledger: Ledger, number: int) -> bool:
    found = await ledger.epoch(number)
    return found is not None and found.state == "sealed"


async def test_a_worker_that_joins_and_then_only_breathes(redis_db: str, ledger: Ledger) -> None:
    """Alive by its heartbeats, but it never comes: one transfer's deadline, then the others go on without it."""
    phantom = Lease(ledger.redis, "default", "phantom", lease_s=60.0)
    async with worker(redis_db) as one, worker(redis_db) as two, publisher(redis_db, transfer_timeout_s=2.5) as source:
        await phantom.join(status("phantom"))
        handle = source.publish(1, WEIGHTS.items())
        number = await eventually(ledger.open_epoch)
        assert await ledger.join(number, "phantom", Join(1))
        report = await asyncio.to_thread(handle.wait, 60)
        assert (report.state, set(report.workers)) == ("committed", {one.id, two.id})
        assert report.failures["phantom"].startswith("was lost during the transfer")
        await serve_some(ledger, 0, 1)


async def test_a_worker_that_is_dead_before_it_joins_costs_nothing(
    redis_db: str, ledger: Ledger, expire_lease: Any
) -> None:
    dead = Lease(ledger.redis, "default", "dead")
    async with worker(redis_db) as running, publisher(redis_db, join_timeout_s=NEVER_S) as source:
        await dead.join(status("dead"))
        handle = source.publish(1, WEIGHTS.items())
        number = await eventually(ledger.open_epoch)
        await eventually(lambda: joined(ledger, number, running.id))
        await expire_lease(dead)
        report = await asyncio.to_thread(handle.wait, 60)
        assert (report.state, report.workers) == ("committed", (running.id,))
        assert report.failures == {"dead": "did not answer the announcement in time"}


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
        assert other.worker._generation.version == 0
        picky.refuse = False
        # it is behind what was committed: it asks, and is caught up from the retained copy
        await eventually(lambda: other.worker._generation.version == 1)
        assert picky.weights.keys() == WEIGHTS.keys()
        assert sound.worker._generation.version == 1


@pytest.mark.parametrize(
    ("error", "waits"),
    [
        ("DigestMismatch: not the tensors of this model: unknown ['first']", False),
        ("TransferTimeout: no rendezvous store at 192.0.2.1:1", True),
    ],
)
async def test_who_never_comes_keeps_nobody_from_the_version(redis_db: str, error: str, waits: bool) -> None:
    """Another model, or no way to the trainer's port: it joins every transfer all the same."""
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
        assert report.failures == {other.id: f"rendezvous: {error}"}
        assert other.worker._generation.version == 0
        async with worker(redis_db) as late:  # the stranger asks to be caught up, too
            await eventually(lambda: late.worker._generation.version == 1)


async def test_who_gives_a_living_trainer_up_is_not_waited_for_and_gets_the_version(redis_db: str) -> None:
    """The trainer's store was silent for a while: one worker has left the transfer, and the other one waits for it."""

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


async def test_the_publisher_dies_after_the_announcement(redis_db: str, ledger: Ledger) -> None:
    """No seal ever comes: the worker serves all the while, and is free for the next publisher."""
    async with worker(redis_db) as running:
        epoch = await ledger.new_epoch()
        await ledger.announce(
            WeightAnnouncement(
                version=1, epoch=epoch, host="127.0.0.1", port=1, join_timeout_s=0.5, transfer_timeout_s=1.0
            )
        )
        await eventually(lambda: joined(ledger, epoch, running.id))
        await serve_some(ledger, 0, 0)
        async with publisher(redis_db, join_timeout_s=NEVER_S) as source:
            assert (await publish(source, 2)).state == "committed"
        await serve_some(ledger, 1, 2)


async def joined(ledger: Ledger, epoch: int, worker_id: str) -> bool:
    found = await ledger.epoch(epoch)
    return found is not None and worker_id in found.joins


async def reported(ledger: Ledger, epoch: int, worker_id: str) -> TransferReport | None:
    found = await ledger.epoch(epoch)
    return found.reports.get(worker_id) if found is not None else None


async def test_the_publisher_dies_after_the_seal(redis_db: str, ledger: Ledger) -> None:
    """The store is there, nobody else ever comes: the worker is back within the transfer's deadline."""
    store = serve_store("127.0.0.1")
    async with worker(redis_db) as running:
        announcement = WeightAnnouncement(
            version=1,
            epoch=await ledger.new_epoch(),
            host="127.0.0.1",
            port=store.port,
            join_timeout_s=2.0,
            transfer_timeout_s=1.0,
        )
        await ledger.announce(announcement)
        await eventually(lambda: joined(ledger, announcement.epoch, running.id))
        await ledger.seal(announcement.model_copy(update={"roster": {running.id: 1}, "world_size": 2, "group": "g"}))
        await serve_some(ledger, 0, 0)
        report = await eventually(lambda: reported(ledger, announcement.epoch, running.id))
        assert not running.worker._follower.updating
        await serve_some(ledger, 1, 0)
        assert (report.ok, report.phase, report.intact) == (False, "rendezvous", True)


async def test_a_worker_without_a_lease_takes_no_part(ledger: Ledger) -> None:
    announcement = WeightAnnouncement(
        version=1, epoch=await ledger.new_epoch(), host="h", port=1, join_timeout_s=1.0, transfer_timeout_s=1.0
    )
    assert not await ledger.join(announcement.epoch, "w", Join(1))  # not announced
    await ledger.announce(announcement)
    assert not await ledger.join(announcement.epoch, "w", Join(1))  # no lease
    await Lease(ledger.redis, "default", "w").join(status("w"))
    assert await ledger.join(announcement.epoch, "w", Join(1))
    await ledger.seal(announcement)
    assert not await ledger.join(announcement.epoch, "w", Join(2))  # too late
    await ledger.close(announcement, committed=True)
    await ledger.close(announcement, committed=False)  # a committed version never goes back
    assert await ledger.version_state(1) == "committed"
    assert await ledger.open_epoch() == 0


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


async def test_a_failed_catch_up_does_not_end_the_publisher(redis_db: str, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = asyncio.Event()
    catch_up = Sender.catch_up
    loop = asyncio.get_running_loop()

    async def once(self: Sender) -> Any:
        if not failed.is_set():
            loop.call_soon_threadsafe(failed.set)
            raise ConnectionError("Redis went away")
        return await catch_up(self)

    monkeypatch.setattr(Sender, "catch_up", once)
    async with publisher(redis_db) as source:
        assert (await publish(source, 1)).state == "committed"  # nobody is there: whoever comes catches up
        async with worker(redis_db) as late:
            await eventually(lambda: late.worker._generation.version == 1)
            assert failed.is_set()
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
            assert await ledger.committed() == running.worker._generation.version == 1
        async with publisher(redis_db, nonfinite="allow") as source:
            assert (await asyncio.to_thread(source.publish(3, broken).wait, 60)).workers == (running.id,)
            assert running.engine.weights["third"].tolist()[0] == 0.0
            assert not running.engine.weights["third"].isfinite().all()
