"""What a worker writes into its journal about its jobs, its weights and itself."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from redis.asyncio import Redis
from support.pools.commanded import slow
from support.pools.pool import eventually, wait_replies, worker
from support.specimens.messages import SHORT, job

from rolloutmq.messages import Broker, ConfigError, SamplingParams
from rolloutmq.messages.journal import Entry, Journal, read
from rolloutmq.producer.control import PoolControl
from rolloutmq.sync import WeightPublisher
from rolloutmq.worker.config import WorkerConfig
from rolloutmq.worker.scripted.engine import ScriptedEngine
from rolloutmq.worker.text.tokenizer import NoTokenizer
from rolloutmq.worker.worker import Worker


def told(entries: Iterable[Entry], event: str) -> list[str]:
    return [entry.data["what"] for entry in entries if entry.event == event]


async def test_a_jobs_attempts_are_in_it_without_its_tokens(redis_db: str, broker: Broker, tmp_path: Path) -> None:
    one = job(n=2, sampling=SHORT)
    async with worker(redis_db, journal=str(tmp_path)) as running:
        await broker.enqueue([one])
        await wait_replies(broker, 2)
        name = running.id
    entries = list(read(tmp_path))
    claimed, *published = [entry for entry in entries if entry.event == "attempt"]
    assert (claimed.job_id, claimed.attempt, claimed.versions, claimed.sample) == (one.id, 1, (0,), -1)
    assert (claimed.data["what"], claimed.data["samples"], claimed.data["worker"]) == ("claimed", 2, name)
    assert claimed.data["queued_s"] >= 0
    assert sorted((entry.sample, entry.attempt, entry.versions) for entry in published) == [(0, 1, (0,)), (1, 1, (0,))]
    assert [entry.data for entry in published] == [{"what": "published", "worker": name, "state": "ok"}] * 2
    assert all(entry.content is None for entry in entries)
    assert told(entries, "worker") == ["joined", "left"]
    assert len(list(read(tmp_path, job=one.id))) == 3


async def test_what_was_saved_and_who_went_on_with_it(redis_db: str, broker: Broker, db: Redis, tmp_path: Path) -> None:
    one = job(sampling=SamplingParams(max_new_tokens=100_000))
    async with worker(redis_db, engine=slow(), checkpoint_s=0.1, journal=str(tmp_path / "lost")) as lost:
        await broker.enqueue([one])
        await eventually(lambda: db.hexists(broker.keys.job(one.id), "k0"))
        await lost.die()
    saved = [entry for entry in read(tmp_path / "lost", job=one.id) if entry.data["what"] == "saved"]
    assert saved[0].sample == 0
    assert (saved[0].versions, saved[0].data["start"], saved[0].data["state"]) == ((0,), 0, "ok")
    assert saved[0].data["tokens"] > 0
    async with worker(redis_db, engine=slow(), journal=str(tmp_path / "next")) as other:
        await eventually(lambda: other.status.held)
        assert await broker.stop([one.id]) == ["ok"]
        await wait_replies(broker, 1)
    entries = list(read(tmp_path / "next"))
    assert "reaped" in told(entries, "worker")
    assert told(entries, "attempt") == ["claimed", "published"]
    (claimed,) = [entry for entry in entries if entry.data["what"] == "claimed"]
    assert (claimed.attempt, claimed.data["continued"]) == (2, [0])


async def test_jobs_that_end_otherwise(redis_db: str, broker: Broker, tmp_path: Path) -> None:
    refused = job(routed_experts=True)
    held = job(sampling=SamplingParams(max_new_tokens=100_000))
    async with worker(redis_db, engine=slow(), drain_s=0.0, journal=str(tmp_path)) as running:
        await broker.enqueue([refused, held])
        await wait_replies(broker, 1)
        await eventually(lambda: running.generation.running)
        running.engine.kill()
        await eventually(lambda: running.engine.starts == 2)
        await eventually(lambda: running.generation.running)
    entries = list(read(tmp_path))
    whole = [
        (entry.data["what"], entry.attempt) for entry in read(tmp_path, job=held.id) if entry.data["what"] != "saved"
    ]
    assert whole == [("claimed", 1), ("given back", 1), ("claimed", 2), ("given back", 2)]
    assert [entry.data["lost"] for entry in entries if entry.data["what"] == "given back"] == [True, False]
    ended = [entry.data for entry in read(tmp_path, job=refused.id)]
    assert [data["what"] for data in ended] == ["claimed", "dead-lettered"]
    assert "routed_experts" in ended[1]["error"]
    assert told(entries, "worker") == ["joined", "engine died", "left"]


async def test_weights_and_commands(redis_db: str, tmp_path: Path) -> None:
    """The worker says what it loaded, the publisher what became of each version."""
    both = {"mode": "in_place", "host": "127.0.0.1", "nonfinite": "refuse"}
    with Journal(tmp_path / "trainer") as trainers:
        async with worker(redis_db, journal=str(tmp_path / "worker")) as running, PoolControl(redis_db) as control:
            with WeightPublisher(redis_db, journal=trainers, **both) as publisher:  # type: ignore[arg-type]
                for version, value in ((3, 1.0), (4, math.nan)):
                    handle = publisher.publish(version, {"w": torch.full((4,), value)})
                    await eventually(handle.done)
            (await control.pause("interrupt")).check()
            (await control.resume()).check()
            name = running.id
    committed, failed = read(tmp_path / "trainer")
    assert [(it.event, it.versions, it.data["what"]) for it in (committed, failed)] == [
        ("weights", (3,), "committed"),
        ("weights", (4,), "failed"),
    ]
    assert (committed.data["workers"], committed.data["nbytes"]) == ([name], 16)
    assert "NaN" in failed.data["failures"]["trainer"]
    entries = list(read(tmp_path / "worker"))
    (announced,) = [entry for entry in entries if entry.event == "announcement"]
    assert announced.versions == (3,)
    assert announced.message is not None
    (loaded,) = [entry for entry in entries if entry.event == "weights"]
    assert (loaded.versions, loaded.data["what"], loaded.data["worker"]) == ((3,), "loaded", name)
    assert (loaded.data["mode"], loaded.data["nbytes"]) == ("in_place", 16)
    assert loaded.data["seconds"] > 0
    assert [entry.data["action"] for entry in entries if entry.data.get("what") == "command"] == ["pause", "resume"]


async def test_a_lease_that_was_lost(redis_db: str, db: Redis, broker: Broker, tmp_path: Path) -> None:
    async with worker(redis_db, journal=str(tmp_path)) as running:
        first = running.id
        await db.zrem(broker.keys.workers, first)
        await db.delete(broker.keys.worker(first))
        await eventually(lambda: running.id != first)
        await eventually(lambda: db.zscore(broker.keys.workers, running.id), what="the next lease")
    entries = [entry.data for entry in read(tmp_path, events="worker")]
    assert [data["what"] for data in entries] == ["joined", "lease lost", "joined", "left"]
    assert entries[1]["worker"] == first != entries[2]["worker"]


def test_a_folder_that_cannot_be_written_is_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file"):
        Worker(
            WorkerConfig(redis_url="redis://nowhere", journal=str(tmp_path / "file")), ScriptedEngine(), NoTokenizer()
        )
