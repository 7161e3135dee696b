"""A worker that begins with the pool's newest version, and does not read its checkpoint."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.pools.late import check_equal, is_waiting, publish, publish_and_leave, publisher, serve, version_of
from support.pools.pool import eventually, wait_replies, worker
from support.specimens.messages import job

from rolloutmq.messages import Broker, connect
from rolloutmq.sync.transfer.ledger import Ledger
from rolloutmq.worker.engine import EngineInfo
from rolloutmq.worker.scripted.engine import ScriptedEngine
from rolloutmq.worker.sglang import SGLangConfig
from rolloutmq.worker.sglang.config import may_begin_empty


class Watched(ScriptedEngine):
    """Remembers how it was started."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: list[bool] = []

    async def start(self, *, empty: bool = False) -> None:
        self.begun.append(empty)
        await super().start(empty=empty)


async def test_a_pool_without_a_version_reads_the_checkpoint(redis_db: str) -> None:
    engine = Watched()
    async with worker(redis_db, engine=engine, first_weights="newest"):
        assert await serve(redis_db, 1) == {(0,)}
    assert engine.begun == [False]


@pytest.mark.parametrize("source", ["trainer", "peer", "snapshot"])
async def test_it_serves_the_newest_version_and_no_other(redis_db: str, tmp_path: Path, source: str) -> None:
    folder = str(tmp_path) if source == "snapshot" else None
    late = Watched()
    async with worker(redis_db, snapshots=folder) as first, publisher(redis_db, snapshots=folder) as trainer:
        assert (await publish(trainer, 1)).state == "committed"
        if source != "trainer":
            await asyncio.to_thread(trainer.close)
        if source == "snapshot":
            await first.stop()
        async with worker(redis_db, engine=late, first_weights="newest", snapshots=folder) as running:
            await eventually(lambda: version_of(running) == 1)
            check_equal(late, 1)
            assert await serve(redis_db, 4) == {(1,)}
    assert late.begun == [True]


async def test_without_anybody_who_has_the_version_it_reads_the_checkpoint_after_all(
    redis_db: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rolloutmq.worker.engine_state.QUARANTINE_S", 0.05)
    engine = Watched()
    async with worker(redis_db):
        await publish_and_leave(redis_db, 1)
    async with (
        connect(redis_db, pool="default") as redis,
        worker(redis_db, engine=engine, first_weights="newest") as late,
    ):
        await eventually(lambda: engine.begun == [True, False])
        await eventually(lambda: is_waiting(Ledger(redis, "default"), late))
        async with publisher(redis_db) as trainer:
            assert (await publish(trainer, 2)).state == "committed"
            assert await serve(redis_db, 1) == {(2,)}
    assert engine.begun == [True, False]


async def test_a_ledger_that_forgets_the_version_does_not_let_random_weights_serve(
    redis_db: str, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rolloutmq.worker.engine_state.QUARANTINE_S", 0.05)
    engine = Watched()
    async with worker(redis_db):
        await publish_and_leave(redis_db, 1)
    async with worker(redis_db, engine=engine, first_weights="newest"):
        await broker.redis.delete(broker.keys.weights)
        assert await serve(redis_db, 1) == {(0,)}
    assert engine.begun == [True, False]


class Dummy(ScriptedEngine):
    """Is configured to read no checkpoint."""

    @property
    def info(self) -> EngineInfo:
        return replace(super().info, random=True)


async def test_random_weights_are_not_served_however_long_no_version_comes(
    redis_db: str, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rolloutmq.worker.engine_state.QUARANTINE_S", 0.05)
    engine = Dummy()
    async with worker(redis_db, engine=engine, first_weights="newest") as running:
        await broker.enqueue([job()])
        await eventually(lambda: "stale" in running.status.blocks)
        assert "random" in running.status.why
        engine.kill()
        await eventually(lambda: engine.starts == 2 and "stale" in running.status.blocks)
        async with publisher(redis_db) as trainer:
            assert (await publish(trainer, 1)).state == "committed"
            assert (await wait_replies(broker, 1))[0].outcome.versions == (1,)
            assert running.status.blocks == ()
    assert engine.starts == 2  # none for want of a version


async def test_with_the_checkpoint_asked_for_random_weights_are_served_and_said_to_be(
    redis_db: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with worker(redis_db, engine=Dummy()):
        assert await serve(redis_db, 1) == {(0,)}
    assert "random (load_format=dummy)" in caplog.text


@pytest.mark.parametrize(
    ("settings", "model", "may"),
    [
        ({}, {}, True),
        ({"max_lora_rank": 8}, {}, True),
        ({"extra": {"mem_fraction_static": 0.5}}, {"text_config": {}}, True),
        ({"task": "reward"}, {}, False),
        ({"load_format": "dummy"}, {}, False),
        ({"extra": {"quantization": "fp8"}}, {}, False),
        ({"extra": {"speculative_algorithm": "EAGLE"}}, {}, False),
        ({}, {"quantization_config": {"quant_method": "fp8"}}, False),
        ({}, {"text_config": {"quantization_config": {}}}, False),
        ({}, [], False),
        ({}, None, False),
    ],
)
def test_what_a_version_does_not_replace_is_read_from_the_checkpoint(
    tmp_path: Path, settings: dict[str, Any], model: Any, may: bool
) -> None:
    if model is not None:
        (tmp_path / "config.json").write_text(json.dumps(model))
    assert may_begin_empty(SGLangConfig(model=str(tmp_path), **settings)) is may
