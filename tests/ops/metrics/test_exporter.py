"""The exporter, on real pools."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest
from redis.asyncio import Redis
from support.pools.fixtures import MakeLease
from support.pools.pool import eventually, short_retries, status, wait_replies, worker
from support.pools.scraped import scraped
from support.redis.roles import create
from support.specimens.messages import job, specimens
from support.specimens.turns import turn
from typer.testing import CliRunner

from rolloutmq.messages import Broker, SamplingParams, WeightAnnouncement, connect
from rolloutmq.messages.broker import RecordedSessions
from rolloutmq.messages.codec import encode
from rolloutmq.messages.model import WorkerStatus
from rolloutmq.ops.cli import app
from rolloutmq.ops.metrics.exporter import Exporter
from rolloutmq.ops.metrics.families import pool_families
from rolloutmq.ops.metrics.reading import PoolReader, Reading
from rolloutmq.ops.metrics.totals import Totals
from rolloutmq.ops.redis.embedded import EmbeddedRedis
from rolloutmq.sync.transfer import Ledger, TransferReport
from rolloutmq.worker.metrics import MetricsServer

DONE = 'rolloutmq_ended_jobs_total{outcome="done"}'
EXPIRED = "rolloutmq_expired_sessions_total"


@asynccontextmanager
async def looking(url: str, every_s: float = 0.02) -> AsyncIterator[tuple[Exporter, int]]:
    exporter = Exporter(url, "default", every_s)
    with MetricsServer("127.0.0.1", 0, exporter.collect) as server:
        task = asyncio.create_task(exporter.run())
        try:
            yield exporter, server.port
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


async def shown(port: int) -> dict[str, float]:
    return await asyncio.to_thread(scraped, port)


def of(reading: Reading, totals: Totals) -> dict[str, float]:
    """A reading's metrics without labels, by name."""
    families = list(pool_families(reading, totals))
    return {sample.name: sample.value for family in families for sample in family.samples if not sample.labels}


@pytest.fixture
async def reader(redis_db: str) -> AsyncIterator[PoolReader]:
    async with connect(redis_db) as redis:
        yield PoolReader(redis, "default")


async def test_it_shows_a_pool_that_works(redis_db: str, broker: Broker) -> None:
    async with looking(redis_db) as (_, port):
        await eventually(lambda: _.up, what="the first look")
        await RecordedSessions(broker, idle_s=0.001).record("default", "lost", "k", turn([1], [2]))
        await RecordedSessions(broker).record("default", "kept", "k", turn([1], [2]))
        async with worker(redis_db, max_running=8, lease_s=1.0):
            await broker.enqueue([job(n=2, sampling=SamplingParams(max_new_tokens=8)) for _ in range(4)])
            await wait_replies(broker, 8)

            async def counted() -> Any:
                seen = await shown(port)
                # One look reads the queue before the workers, and jobs may end between.
                told = seen.get("rolloutmq_generated_tokens_total"), seen.get(DONE), seen.get(EXPIRED)
                return seen if told == (64, 4, 1) else None

            seen = await eventually(counted, what="a look after the worker's heartbeat")
        assert seen["rolloutmq_up"] == 1
        assert (seen["rolloutmq_accepted_jobs_total"], seen["rolloutmq_job_attempts_total"]) == (4, 4)
        assert (seen["rolloutmq_job_redeliveries_total"], seen["rolloutmq_lost_leases_total"]) == (0, 0)
        assert seen['rolloutmq_workers{state="serving",version="0"}'] == 1
        assert seen['rolloutmq_sample_staleness_versions_bucket{le="0.0"}'] == 8
        assert seen["rolloutmq_queued_work_seconds"] == seen["rolloutmq_running_jobs"] == 0
        assert seen['rolloutmq_used_bytes{kind="replies"}'] > 0
        assert seen['rolloutmq_used_bytes{kind="sessions"}'] > 0
        assert seen["rolloutmq_clients_with_unread_replies"] == 1
        assert seen["rolloutmq_redis_memory_bytes"] > 0

        async def left() -> bool:
            seen = await shown(port)
            return not any(name.startswith("rolloutmq_workers{") for name in seen)

        await eventually(left, what="a look after the worker left")
        assert (await shown(port))["rolloutmq_generated_tokens_total"] == 64  # it is a counter: it never falls


async def test_redis_may_go_away_and_come_back(redis_server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch) -> None:
    short_retries(monkeypatch)
    async with looking(redis_server.url) as (exporter, port):
        await eventually(lambda: exporter.up, what="the first look")
        redis_server.kill()
        await eventually(lambda: not exporter.up, what="a look that fails")
        seen = await shown(port)
        assert seen["rolloutmq_up"] == 0
        assert seen["rolloutmq_exporter_failed_reads_total"] >= 1
        told = {name for name in seen if not name.startswith(("rolloutmq_exporter_", "rolloutmq_standstill{"))}
        assert told == {"rolloutmq_up"}

        async def why() -> bool:
            return (await shown(port)).get('rolloutmq_standstill{cause="redis-away"}') == 1

        await eventually(why)
        redis_server.start()
        await eventually(lambda: exporter.up, what="a look at the new server")
        assert "rolloutmq_committed_version" in await shown(port)


HOSTILE = {
    "no message": b"\xff\xfe",
    "another kind": encode(job()),
    "huge numbers": encode(
        status("w9", version=(1 << 64) - 1, generated_tokens=(1 << 64) - 1, staleness=((1 << 64) - 1,) * 7)
    ),
    "a staleness of its own": encode(status("w9", staleness=(1, 2))),
    "a name like a label": encode(status('w9"}\n{', model='"\n', engine="\\")),
}


@pytest.mark.parametrize("what", HOSTILE)
async def test_a_hostile_heartbeat_does_no_harm(
    what: str, redis_db: str, db: Redis, broker: Broker, joined: MakeLease
) -> None:
    await joined("w1", generated_tokens=5)
    async with looking(redis_db) as (exporter, port):
        await eventually(lambda: exporter.up, what="the first look")
        await db.zadd(broker.keys.workers, {"w9": 1e14})
        await db.hset(broker.keys.worker("w9"), "status", HOSTILE[what])
        before = exporter._looks
        await eventually(lambda: exporter._looks > before + 2, what="two looks after it")
        seen = await shown(port)
    assert (seen["rolloutmq_up"], seen["rolloutmq_generated_tokens_total"]) == (1, 0)
    assert seen['rolloutmq_workers{state="serving",version="0"}'] >= 1
    assert sum(value for name, value in seen.items() if name.startswith("rolloutmq_sample_staleness_versions")) == 0


async def test_a_transfer_whose_record_is_broken_hides_nothing_else(
    reader: PoolReader, broker: Broker, db: Redis
) -> None:
    await broker.enqueue([job()])
    await reader.read()
    ledger = Ledger(db, "default")
    broken, _ = [await ledger.new_epoch() for _ in range(2)]
    await db.set(broker.keys.epoch(broken), "none of ours")
    for _ in range(2):
        reading = await reader.read()
        assert (sum(reading.pool.load.queued), reading.ended) == (1, ())


async def test_many_versions_share_a_label(redis_db: str, reader: PoolReader, joined: MakeLease) -> None:
    for number in range(40):
        await joined(f"w{number}", version=number)
    (workers,) = [f for f in pool_families(await reader.read(), Totals()) if f.name == "rolloutmq_workers"]
    versions = {sample.labels["version"]: sample.value for sample in workers.samples}
    assert versions["older"] == 24
    assert len(versions) == 17


async def test_how_evenly_the_workers_are_loaded(reader: PoolReader, joined: MakeLease) -> None:
    def loads(reading: Reading) -> dict[str, float]:
        (family,) = [it for it in pool_families(reading, Totals()) if it.name == "rolloutmq_sharing_workers"]
        return {sample.labels["load"]: sample.value for sample in family.samples}

    assert of(await reader.read(), Totals())["rolloutmq_imbalance_ratio"] == 1
    for name, held in (("w1", 30), ("w2", 12), ("w3", 3)):
        lease = await joined(name)
        lease.holds = lambda held=held: held
        await lease.claim(9, 9, 0)
    reading = await reader.read()
    assert of(reading, Totals())["rolloutmq_imbalance_ratio"] == pytest.approx(30 / 17)  # w3 can hold 12
    assert loads(reading) == {"below": 2, "at": 0, "above": 1}


async def test_a_look_costs_the_same_whatever_waits(reader: PoolReader, broker: Broker, joined: MakeLease) -> None:
    await joined("w1")

    async def commands() -> int:
        before = (await broker.redis.info("stats"))["total_commands_processed"]
        await reader.read()
        return int((await broker.redis.info("stats"))["total_commands_processed"]) - int(before)

    await broker.enqueue([job(priority="low") for _ in range(20)])
    await commands()  # the first one opens connections
    assert await commands() <= 80
    await broker.enqueue([job(priority="low") for _ in range(1000)])
    assert await commands() <= 80


async def test_seconds_of_work_follow_from_what_the_pool_has_done(
    reader: PoolReader, broker: Broker, joined: MakeLease
) -> None:
    totals = Totals()
    totals.take_in(await reader.read(), 0.0)
    assert of(await reader.read(), totals)["rolloutmq_queued_work_seconds"] == 0
    await broker.enqueue([job(n=4) for _ in range(3)])
    assert "rolloutmq_queued_work_seconds" not in of(await reader.read(), totals)  # nobody knows yet
    lease = await joined("w1", running=2, max_running=2)
    for second in (1, 2):
        await lease.heartbeat(status("w1", running=2, generated_tokens=100 * second, finished_samples=2 * second))
        reading = await reader.read()
        totals.take_in(reading, float(second))
    seen = of(reading, totals)
    assert (totals.rate, totals.tokens_per_sample) == (100.0, 50.0)
    assert seen["rolloutmq_queued_samples"] == 12
    assert seen["rolloutmq_queued_work_seconds"] == pytest.approx(12 * 50 / 100)
    await lease.leave()
    reading = await reader.read()
    totals.take_in(reading, 60.0)
    assert of(reading, totals)["rolloutmq_queued_work_seconds"] == pytest.approx(6.0)  # what the pool could do stays


async def test_the_rate_is_that_of_time_with_work(reader: PoolReader, joined: MakeLease) -> None:
    reading, totals = await reader.read(), Totals()

    def look(now: float, tokens: int, running: int) -> None:
        worker = WorkerStatus(**status("w1").model_dump() | {"generated_tokens": tokens, "running": running})
        totals.take_in(replace(reading, pool=replace(reading.pool, workers=(worker,))), now)

    look(0.0, 0, 1)
    look(10.0, 1000, 1)
    look(11.0, 1100, 0)
    look(1000.0, 1100, 0)  # idle for long
    look(1010.0, 1100, 1)
    assert totals.rate == pytest.approx(1100 / 21)
    for second in range(1, 101):
        look(1010.0 + second, 1100 + 500 * second, 1)
    assert totals.rate == pytest.approx(500)


async def test_the_command_serves_until_it_is_told_to_stop(redis_db: str) -> None:
    command = [sys.executable, "-m", "rolloutmq.ops.entry", "exporter", "--redis", redis_db, "--port", "0"]
    command += ["--host", "127.0.0.1", "--every", "1"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:  # noqa: ASYNC220
        try:
            line = await asyncio.to_thread(process.stderr.readline)
            port = int(line.rpartition(" ")[2])
            await eventually(lambda: scraped(port).get("rolloutmq_up") == 1, what="the first look")
            process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(process.wait, 60) == 0
        finally:
            process.kill()


def test_the_command_says_what_the_wanted_workers_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr("rolloutmq.ops.metrics.run_exporter", lambda *_, **named: given.update(named), raising=False)
    flags = ["--target", "30", "--stabilise", "600", "--start-takes", "900"]
    ran = CliRunner().invoke(app, ["exporter", *flags])
    assert ran.exit_code == 0, ran.output
    assert (given["scale"].target_s, given["scale"].stabilise_s, given["scale"].startup_s) == (30, 600, 900)
    assert given["scale"].most >= 1_000_000, "bounds are those of whoever scales"


async def test_a_transfer_is_counted_once_it_has_ended(reader: PoolReader, db: Redis, joined: MakeLease) -> None:
    await joined("w1")
    ledger, totals = Ledger(db, "default"), Totals()

    async def look() -> Totals:
        totals.take_in(await reader.read(), time.monotonic())
        return totals

    await look()
    told = specimens()["announcement"]
    assert isinstance(told, WeightAnnouncement)
    told = told.model_copy(update={"epoch": await ledger.new_epoch()})
    await ledger.announce(told)
    report = TransferReport(ok=True, phase="done", nbytes=3_000, rendezvous_s=0.5, receive_s=1.0, load_s=1.5)
    await ledger.report(told, "w1", report)
    await ledger.report(told, "w2", TransferReport(ok=False, phase="verify", error="no"))
    assert (await look()).syncs.total == 0
    await ledger.close(told, True, None, {})
    for _ in range(2):
        await look()
        assert (totals.syncs.counts, totals.syncs.total) == ([0, 0, 0, 0, 0, 1, 0, 0, 0, 0], 3.0)
        assert (totals.sync_bytes, totals.failed_syncs, totals.last_bytes_per_s) == (3_000, 1, 1_000.0)


async def test_the_operators_user_may_run_it(redis_server: EmbeddedRedis) -> None:
    for more, knows in (("-info", False), ("", True)):
        url = create(redis_server, "operator", "mine", more)
        async with connect(url, pool="mine") as redis:
            reading = await PoolReader(redis, "mine").read()
        assert (reading.pool.memory > 0) == knows
