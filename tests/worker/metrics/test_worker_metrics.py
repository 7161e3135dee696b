"""A worker's metrics and probes, asked over HTTP while it works."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, suppress
from typing import Any

import pytest
from support.peers.publishing import WEIGHTS, publish, publisher
from support.pools.pool import Running, eventually, wait_replies
from support.pools.scraped import fetched, scraped
from support.specimens.messages import job

from rolloutmq.messages import Broker, SamplingParams
from rolloutmq.messages.errors import ConfigError, EngineError
from rolloutmq.sync.transfer import TransferReport
from rolloutmq.worker.config import WorkerConfig
from rolloutmq.worker.gate import Gate
from rolloutmq.worker.main import with_metrics
from rolloutmq.worker.metrics import Histogram, MetricsServer, finite
from rolloutmq.worker.scripted.engine import ScriptedEngine
from rolloutmq.worker.text.tokenizer import NoTokenizer

W = "rolloutmq_worker_"


@asynccontextmanager
async def watched(url: str, engine: ScriptedEngine, **settings: Any) -> AsyncIterator[tuple[Running, int]]:
    """A worker with metrics, and their port. It may not have joined yet."""
    config = WorkerConfig(redis_url=url, drain_s=0.0, metrics_port=0, metrics_host="127.0.0.1", **settings)
    worker, server = with_metrics(config, engine, NoTokenizer())
    assert isinstance(server, MetricsServer)
    with server:
        running = Running(worker, engine)
        try:
            yield running, server.port
        finally:
            await running.stop()


async def test_it_shows_what_it_does(redis_db: str, broker: Broker) -> None:
    engine = ScriptedEngine(tokens_per_s=1e9)
    async with watched(redis_db, engine, max_running=4) as (running, port):
        await eventually(running.worker.joined.is_set)
        sampling = SamplingParams(max_new_tokens=8)
        await broker.enqueue([job(token_ids=[1, 2, 3], n=2, sampling=sampling) for _ in range(3)])
        await wait_replies(broker, 6)
        seen = await asyncio.to_thread(scraped, port)
        assert seen[W + "finished_samples_total"] == 6
        assert seen[W + "generated_tokens_total"] == 48
        assert seen[W + "prompt_tokens_total"] == 18
        assert seen[W + "cached_prompt_tokens_total"] == 0
        assert seen[W + "running_samples"] == seen[W + "stalled_seconds"] == 0
        assert seen[W + "slots"] == running.worker.config.capacity
        assert seen[W + 'sample_staleness_versions_bucket{le="0.0"}'] == 6
        assert seen[W + 'engine_errors_total{kind="failed"}'] == 0
        for phase in ("process", "imports", "first_answer"):
            assert seen[f'{W}startup_seconds{{phase="{phase}"}}'] >= 0
        assert seen[W + 'startup_seconds{phase="process"}'] > 0.2  # of this process, which has imported torch
        running.worker.vitals.beat(running.worker._status())  # the next heartbeat
        seen = await asyncio.to_thread(scraped, port)
        assert seen[W + 'startup_seconds{phase="weights"}'] >= 0
        assert seen[W + "engine_restarts_total"] == 0
        assert running.worker._status().staleness == (6, 0, 0, 0, 0, 0, 0)


async def test_what_runs_counts_before_it_has_ended(redis_db: str, broker: Broker) -> None:
    async with watched(redis_db, ScriptedEngine(tokens_per_s=1000.0), lease_s=1.0) as (running, _):
        vitals = running.worker.vitals
        await broker.enqueue([job(n=4, sampling=SamplingParams(max_new_tokens=1_000_000))])
        await eventually(lambda: vitals.status is not None and vitals.status.tokens_per_s > 100)
        assert (vitals.generation.generated_tokens, vitals.status and vitals.status.finished_samples) == (0, 0)
        running.engine.kill()  # what it had under way is lost: the total falls, and the rate is no negative number
        await eventually(lambda: vitals.status is not None and vitals.status.engine_restarts > 0)


async def test_it_shows_how_full_the_kv_cache_is(
    redis_db: str, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rolloutmq.worker.metrics.vitals.KV_S", 0.01)
    engine, name = ScriptedEngine(tokens_per_s=1.0), W + "kv_cache_use_ratio"
    async with watched(redis_db, engine) as (_, port):

        async def shown(value: float | None) -> bool:
            return (await asyncio.to_thread(scraped, port)).get(name) == value

        await eventually(lambda: shown(0.0))
        await broker.enqueue([job(n=2, sampling=SamplingParams(max_new_tokens=1000))])
        await eventually(lambda: shown(2 * 64 / 8192))
        monkeypatch.setattr(engine.ops, "operate", raising)
        await eventually(lambda: shown(None))


async def raising(operation: str, params: Any) -> Any:
    raise EngineError("it does not say")


async def test_ready_once_it_serves_and_live_all_the_time(redis_db: str) -> None:
    engine = ScriptedEngine(start_s=3600.0)
    async with watched(redis_db, engine) as (running, port):
        await eventually(lambda: running.worker._keeper is not None)
        assert await asyncio.to_thread(fetched, port, "/live") == (200, "yes\n")
        assert await asyncio.to_thread(fetched, port, "/ready") == (503, "no\n")
        assert (await asyncio.to_thread(scraped, port))[W + "ready"] == 0
    engine = ScriptedEngine()
    async with watched(redis_db, engine, lease_s=1.0) as (running, port):
        await eventually(lambda: running.worker.vitals.ready, what="a heartbeat of a worker that serves")
        assert await asyncio.to_thread(fetched, port, "/ready") == (200, "yes\n")
        assert (await asyncio.to_thread(fetched, port, "/nothing"))[0] == 404


async def test_a_worker_that_beats_no_more_is_not_live(redis_db: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with watched(redis_db, ScriptedEngine(), lease_s=1.0) as (running, _):
        vitals = running.worker.vitals
        await eventually(lambda: vitals.status is not None, what="a heartbeat")
        assert vitals.live
        later = time.monotonic() + 61
        monkeypatch.setattr("rolloutmq.worker.metrics.vitals.time.monotonic", lambda: later)
        vitals._beat_at = later - 61  # as if none had come since
        assert not vitals.live


async def test_it_shows_the_weights_that_it_received(redis_db: str) -> None:
    async with watched(redis_db, ScriptedEngine()) as (running, port), publisher(redis_db) as source:
        await eventually(running.worker.joined.is_set)
        assert (await publish(source, 3)).workers == (running.id,)
        seen = await asyncio.to_thread(scraped, port)
    assert (seen[W + "weights_version"], seen[W + "versions_behind"]) == (3, 0)
    assert (seen[W + "sync_seconds_count"], seen[W + "failed_syncs_total"]) == (1, 0)
    assert seen[W + "sync_bytes_total"] == sum(tensor.nbytes for tensor in WEIGHTS.values())
    assert seen[W + "last_sync_bytes_per_second"] > 0
    assert seen[W + 'gate_closed_seconds_total{reason="quiet"}'] > 0


def test_seconds_of_a_transfer() -> None:
    staged = TransferReport(ok=True, phase="done", rendezvous_s=1.0, receive_s=2.0, load_s=4.0)
    direct = TransferReport(ok=True, phase="done", rendezvous_s=1.0, receive_s=4.0, load_s=4.0)
    assert (staged.seconds, direct.seconds) == (7.0, 5.0)
    odd = TransferReport(ok=True, phase="done", rendezvous_s=float("nan"), receive_s=-1.0, load_s=float("inf"))
    assert finite(odd.seconds) == finite(-1.0) == finite(float("inf")) == 0.0


def test_a_histogram_counts_up_to_and_with_its_bounds() -> None:
    seen = Histogram((0, 1, 2))
    for value in (0, 1, 1, 2, 7):
        seen.observe(value)
    assert seen.buckets() == [("0.0", 1), ("1.0", 3), ("2.0", 4), ("+Inf", 5)]
    seen.add([1, 0, 0, 2])
    assert (seen.counts, seen.total) == ([2, 2, 1, 3], 11 + 4)


def test_a_gate_knows_how_long_it_was_held(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("rolloutmq.worker.gate.time.monotonic", lambda: now)
    gate = Gate()
    first, second = gate.holder("update"), gate.holder("update")
    first.acquire()
    now += 2.0
    second.acquire()
    now += 1.0
    assert gate.held_s(now) == {"update": 4.0}
    first.release()
    second.release()
    now += 50.0
    assert gate.held_s(now) == {"update": 4.0}


def test_a_port_that_is_taken_is_named() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}"):
            MetricsServer("127.0.0.1", port, list)


async def test_requests_that_never_end_use_up_no_descriptors() -> None:
    before, halves = len(os.listdir("/proc/self/fd")), list[socket.socket]()

    def few_are_open() -> bool:
        for half in halves:
            with suppress(OSError):
                half.sendall(b"x")  # a byte now and then, so that none is silent
        return len(os.listdir("/proc/self/fd")) < before + len(halves) + 40  # the clients' are this process' too

    with ExitStack() as stack, MetricsServer("127.0.0.1", 0, list, {"/live": lambda: True}) as server:
        for _ in range(100):
            halves.append(stack.enter_context(socket.create_connection(("127.0.0.1", server.port))))
            halves[-1].sendall(b"GET /live HTTP/1.1\r\n")
        status, _ = await asyncio.to_thread(fetched, server.port, "/live")
        assert status == 200
        await eventually(few_are_open)


def test_without_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("rolloutmq.worker.metrics.")]:
        if name.rpartition(".")[2] in {"server", "kinds", "families"}:
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    config = WorkerConfig(redis_url="redis://127.0.0.1:1/0", metrics_port=0)
    with pytest.raises(ConfigError, match=r"rolloutmq\[worker,metrics\]"):
        with_metrics(config, ScriptedEngine(), NoTokenizer())
