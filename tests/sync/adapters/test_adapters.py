"""LoRA adapters from the trainer's tensors to the workers' engines."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from redis.asyncio import Redis
from support.peers.publishing import publisher
from support.pools.pool import eventually, worker
from support.specimens.adapters import CONFIG, HEAD, publish, publish_weights, tensors

from rolloutmq import InvalidField
from rolloutmq.messages.errors import EngineError, TransferTimeout
from rolloutmq.messages.model.weights import WeightAnnouncement
from rolloutmq.sync.adapters import receive_adapter
from rolloutmq.sync.adapters.format import Adapter
from rolloutmq.sync.disk.store import SnapshotStore
from rolloutmq.sync.publish.hub import Hub, Outgoing
from rolloutmq.sync.transfer.ledger import Ledger, VersionHolder
from rolloutmq.sync.transfer.order import SENDER_GONE, TransferOrder, TransferReport
from rolloutmq.sync.wire import Lines
from rolloutmq.worker.engine.loaded_adapters import NOT_ENABLED
from rolloutmq.worker.scripted.engine import ScriptedEngine

Q = f"{HEAD}.q_proj"


def check_loaded(engine: ScriptedEngine, name: str, version: int, dtype: torch.dtype = torch.bfloat16) -> None:
    adapter = engine.loaded[name, version]
    sent = tensors(version, dtype)
    assert adapter.config == CONFIG
    assert adapter.tensors.keys() == sent.keys()
    for key, tensor in sent.items():
        assert adapter.tensors[key].dtype == dtype
        assert torch.equal(adapter.tensors[key], tensor), key


@pytest.mark.parametrize("bucket_bytes", [512, 4 << 20])
async def test_every_worker_gets_every_bit(redis_db: str, db: Redis, bucket_bytes: int) -> None:
    ledger = Ledger(db, "default")
    async with (
        worker(redis_db, engine=ScriptedEngine(lora=True)) as one,
        worker(redis_db, engine=ScriptedEngine(lora=True)) as two,
        publisher(redis_db, bucket_bytes=bucket_bytes) as source,
    ):
        for name, version in (("math", 3), ("code", 1), ("math", 4)):
            report = await publish(source, name, version)
            assert (report.state, report.adapter, report.version) == ("committed", name, version)
            assert set(report.workers) == {one.id, two.id}
            assert report.failures == {}
            assert report.nbytes == sum(tensor.nbytes for tensor in tensors(version).values())
            for running in (one, two):
                check_loaded(running.engine, name, version)
                assert running.generation.version == 0
        assert await ledger.adapters() == {"math": 4, "code": 1}
        assert await ledger.version_state("math@4") == "committed"
        assert await ledger.committed() == 0
        kept = [each.snapshot.manifest.version for each in source._sender._hub._outgoing.values()]
        assert sorted(kept) == [1, 4]  # for whoever comes late, and nothing else of a transfer stays
        for version in (4, 3, 0, -1, True, 1 << 40):
            with pytest.raises(InvalidField, match="version"):
                source.publish_adapter("math", version, tensors(1), CONFIG)
        with pytest.raises(InvalidField, match="name"):
            source.publish_adapter("ma th", 1, tensors(1), CONFIG)
    async with publisher(redis_db) as again:
        with pytest.raises(InvalidField, match="above 4"):
            again.publish_adapter("math", 4, tensors(1), CONFIG)


async def test_a_worker_without_lora_says_so_and_the_others_serve(
    redis_db: str, db: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    async with worker(redis_db) as plain, publisher(redis_db) as source:
        report = await publish(source, "math", 1)
        assert report.state == "failed"
        assert report.failures == {plain.id: f"load: {NOT_ENABLED}"}
        assert f"version 1 of adapter math: {report.failures}" in [each.getMessage() for each in caplog.records]
        assert await Ledger(db, "default").adapters() == {}
        async with worker(redis_db, engine=ScriptedEngine(lora=True)) as able:
            report = await publish(source, "math", 2)
            assert (report.state, report.workers) == ("committed", (able.id,))
            assert report.failures.keys() == {plain.id}


async def test_what_cannot_be_loaded_is_refused_and_not_asked_for_again(redis_db: str, db: Redis) -> None:
    class Small(ScriptedEngine):
        asked = 0

        async def load_adapter(self, adapter: Adapter) -> None:
            self.asked += 1
            raise EngineError("rank 4 is above max_lora_rank=2")

    async with (
        worker(redis_db, engine=Small(lora=True)) as small,
        worker(redis_db, engine=ScriptedEngine(lora=True)) as able,
        publisher(redis_db) as source,
    ):
        report = await publish(source, "math", 1)
        assert report.workers == (able.id,)
        assert report.failures == {small.id: "load: rank 4 is above max_lora_rank=2"}
        follower = small.worker._follower
        assert await Ledger(db, "default").adapters() == {"math": 1}
        assert not await follower.adapters.keep_up(small.id, small.generation.state.turn)
        assert small.engine.asked == 1  # type: ignore[attr-defined]


async def test_a_flipped_bit_is_found_and_named(redis_db: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with worker(redis_db, engine=ScriptedEngine(lora=True)) as running, publisher(redis_db) as source:
        assert (await publish(source, "math", 1)).state == "committed"
        offer = Hub.offer

        def flipped(self: Hub, *told: Any) -> Outgoing:
            outgoing = offer(self, *told)
            sent = outgoing.snapshot.buckets[0].clone()
            sent[1] ^= 4
            outgoing.offer._bucket = lambda index: sent
            return outgoing

        monkeypatch.setattr(Hub, "offer", flipped)
        report = await publish(source, "math", 2)
        assert report.state == "failed"
        why = report.failures[running.id]
        assert f"receive: DigestMismatch: tensor {Q}.lora_A.weight" in why
        assert f"from {source._sender._hub.address}" in why  # type: ignore[union-attr]
        assert running.engine.loaded.keys() == {("math", 1)}


def test_a_trainer_that_goes_silent_is_given_up_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        told = WeightAnnouncement(
            version=1,
            epoch=1,
            host="127.0.0.1",
            port=silent.getsockname()[1],
            token="t",
            join_timeout_s=1,
            transfer_timeout_s=0.3,
            adapter="math",
        )
        with pytest.raises(TransferTimeout, match=SENDER_GONE):
            receive_adapter(Lines(None, 0, 1), TransferOrder.of_announcement(told, "w"), "math")


async def test_snapshots_on_disk_are_of_weights_only(redis_db: str, tmp_path: Path) -> None:
    async with publisher(redis_db, snapshots=tmp_path) as source:
        assert (await publish(source, "math", 5)).state == "committed"
        assert (await publish_weights(source, 1)).state == "committed"
        assert (await publish(source, "math", 6)).state == "committed"
    assert source.snapshots_saved == 1
    assert SnapshotStore(tmp_path).versions() == [1]


async def test_only_a_version_of_the_same_adapter_supersedes(redis_db: str) -> None:
    async with publisher(redis_db) as source:
        handles = [
            source.publish_adapter(name, version, tensors(version), CONFIG)
            for name, version in (("a", 1), ("b", 1), ("b", 2), ("b", 3))
        ]
        reports = [await asyncio.to_thread(handle.wait, 60) for handle in handles]
    assert [(one.adapter, one.state) for one in (reports[0], reports[3])] == [("a", "committed"), ("b", "committed")]
    assert {one.state for one in reports[1:3]} <= {"superseded", "committed"}
    assert reports[2].state == "superseded" or reports[1].state == "committed"


async def test_whoever_comes_late_gets_every_adapter(redis_db: str) -> None:
    async with publisher(redis_db) as source:
        for name, version in (("math", 1), ("math", 2), ("code", 7)):
            assert (await publish(source, name, version)).state == "committed"  # an empty pool
        async with worker(redis_db, engine=ScriptedEngine(lora=True)) as late, worker(redis_db) as plain:
            await eventually(lambda: late.engine.loaded.keys() == {("math", 2), ("code", 7)})
            check_loaded(late.engine, "math", 2)
            assert plain.engine.loaded == {}
            await publish_weights(source, 1)
            late.engine.kill()
            await eventually(lambda: late.engine.starts == 2 and len(late.engine.loaded) == 2, what="the restart")
            await eventually(lambda: late.generation.version == 1)
            check_loaded(late.engine, "code", 7)


async def test_the_first_good_report_commits_an_adapter(redis_db: str, db: Redis) -> None:
    ledger = Ledger(db, "default")
    for version in (1, 2):
        told = WeightAnnouncement(
            version=version, epoch=version, host="h", port=1, join_timeout_s=1, transfer_timeout_s=1, adapter="math"
        )
        await ledger.announce(told)
        await ledger.report(told, "w1", TransferReport(ok=version == 1, phase="done"))
        assert await ledger.adapters() == {"math": 1}  # by the worker's report, and the trainer's word changes nothing
        holder = VersionHolder(version, "h:1", "token")
        assert await ledger.close(told, version == 1, holder, {"w2": "was lost"}) == (version == 1)
    assert await ledger.adapters() == {"math": 1}
    assert await ledger.adapter_holder("math") == VersionHolder(1, "h:1", "token")
