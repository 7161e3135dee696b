"""The local autoscaler with real worker processes: 0 -> 3 -> 0, and what may go wrong on the way."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from redis.asyncio import Redis
from support.pools import scripted_worker
from support.pools.pool import check_scripted, eventually, replies, status
from support.pools.scaling import Seen, scaling
from support.redis.roles import LINES, create
from support.specimens.messages import job

from rolloutmq.messages import Broker, SamplingParams, connect
from rolloutmq.messages.errors import ConfigError, InvalidField
from rolloutmq.messages.redis import Keys
from rolloutmq.ops.metrics import PoolWatch
from rolloutmq.ops.redis.embedded import EmbeddedRedis
from rolloutmq.ops.scale import CrashLoop, Means, PoolView, Scaler, ScalerLock, ScaleSettings, ThisHost, places
from rolloutmq.ops.scale.process import LEAVE

QUICK = ScaleSettings(least=0, most=3, target_s=0.2, stabilise_s=0.3, startup_s=0.0)
SLEEPS = [sys.executable, "-c", "import signal; signal.sigwait({signal.SIGTERM})"]
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); signal.pause()"
HANGS = [sys.executable, "-c", DEAF]
FAILS = [sys.executable, "-c", "import sys; print('no such model', file=sys.stderr); sys.exit(3)"]


def means(folder: Path, command: list[str], **more: Any) -> Means:
    given: dict[str, Any] = {"every_s": 0.02, "pause_s": 0.01} | more
    return Means(ThisHost(command, given.pop("environment", {}), folder), **given)


@pytest.fixture
def lock(db: Redis) -> ScalerLock:
    return ScalerLock(db, "default", 5.0)


def is_gone(process: psutil.Process) -> bool:
    """Whether it has ended; nobody may have asked yet how."""
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


class Feeder:
    """Keeps a pool under load until it is told to stop."""

    def __init__(self, broker: Broker) -> None:
        self.broker, self.ids = broker, list[str]()

    async def feed(self, until: Any, what: str) -> None:
        """More jobs whenever few wait, until the condition holds."""

        async def enough() -> bool:
            if sum((await self.broker.load()).queued) < 40:
                jobs = [job(sampling=SamplingParams(max_new_tokens=20)) for _ in range(40)]
                await self.broker.enqueue(jobs)
                self.ids += [one.id for one in jobs]
            return bool(until())

        await eventually(enough, 60, what)


async def test_from_nothing_to_three_and_back_with_a_kill_in_the_middle(
    redis_db: str, db: Redis, broker: Broker, lock: ScalerLock, tmp_path: Path
) -> None:
    command = scripted_worker.command(tokens_per_s=100, max_running=4, lease_s=2.0, drain_s=5.0)
    how = means(tmp_path, command, environment=scripted_worker.environment(redis_db))
    scaler = Scaler(QUICK, how, places(3), PoolWatch(db, "default"), lock)
    feeder = Feeder(broker)
    async with scaling(scaler, lock):
        assert scaler.members == []

        def serving() -> list[int]:
            return [one.pid for one in scaler.members if one.served_at is not None and not one.leaving]

        await feeder.feed(lambda: len(serving()) == 3, "three serve")
        first = set(serving())
        killed = serving()[0]
        os.kill(killed, signal.SIGKILL)
        await feeder.feed(lambda: len(serving()) == 3 and killed not in serving(), "another one serves in its place")
        assert len(first - {killed}) == 2

        async def all_there() -> bool:
            return bool(await broker.redis.xlen(broker.keys.reply("client")) >= len(feeder.ids))

        await eventually(all_there, 60, "all results")
        await eventually(lambda: not scaler.members, 60, "all workers have left")
        found = await replies(broker)
        assert sorted(one.outcome.job_id for one in found) == sorted(feeder.ids)  # each exactly once
        for one in found:
            assert one.outcome.finish_reason == "length"  # none was aborted
            check_scripted(one.outcome, 3)
        load = await broker.load()
        assert (load.done, load.dead) == (len(feeder.ids), 0)
        assert load.leases_lost >= 1
        assert await broker.workers() == []
        assert scaler.decision.state == "idle"


async def test_long_samples_are_handed_over_and_not_cut(
    redis_db: str, db: Redis, broker: Broker, lock: ScalerLock, tmp_path: Path
) -> None:
    """A worker leaves in the middle of samples that take longer than its drain: another one goes on with the tokens."""
    command = scripted_worker.command(tokens_per_s=50, max_running=2, prefetch=0, lease_s=5.0, drain_s=0.0)
    how = means(tmp_path, command, environment=scripted_worker.environment(redis_db))
    watch = PoolWatch(db, "default")
    scaler = Scaler(replace(QUICK, least=2), how, places(2), watch, lock)
    async with scaling(scaler, lock):
        await eventually(lambda: sum(one.served_at is not None for one in scaler.members) == 2, 60, "both serve")
        jobs = [job(sampling=SamplingParams(max_new_tokens=100)) for _ in range(4)]
        await broker.enqueue(jobs)
        await eventually(lambda: sum(one.running for one in watch.workers) == 4, what="all run")
        scaler._settings = replace(QUICK, least=0, most=1)  # the operator wants one
        await eventually(lambda: len(scaler.members) == 1, what="one has left")

        async def all_there() -> bool:
            return len(await replies(broker)) == 4

        await eventually(all_there, 60, "all results")
        for one in await replies(broker):
            assert (one.outcome.finish_reason, len(one.outcome.token_ids)) == ("length", 100)
            check_scripted(one.outcome, 3)
        assert (await broker.load()).redelivered >= 2  # what the one that left had


async def test_a_crash_loop_is_said_and_stopped(lock: ScalerLock, tmp_path: Path) -> None:
    scaler = Scaler(QUICK, means(tmp_path, FAILS), places(3), Seen(PoolView(0.0, queued=9)), lock)
    async with scaling(scaler, lock) as task:
        with pytest.raises(CrashLoop, match=r"(?s)5 workers in a row failed.*exit code 3.*no such model"):
            await task
    assert scaler.members == []


async def test_a_worker_that_never_serves_counts_as_failed(lock: ScalerLock, tmp_path: Path) -> None:
    how = means(tmp_path, SLEEPS, ready_s=0.05)
    scaler = Scaler(QUICK, how, places(1), Seen(PoolView(0.0, queued=9)), lock)
    async with scaling(scaler, lock) as task:
        with pytest.raises(CrashLoop, match=r"did not serve within 0\.05 s"):
            await task


async def hangs(scaler: Scaler) -> None:
    """Wait until the scaler has one worker, which does not heed SIGTERM."""
    await eventually(lambda: [one.last_lines() for one in scaler.members] == ["deaf"], what="it is deaf")


@pytest.mark.parametrize("stopped", [False, True])
async def test_a_worker_that_hangs_in_its_drain_is_killed(lock: ScalerLock, tmp_path: Path, stopped: bool) -> None:
    how = means(tmp_path, HANGS, leave_s=0.05)
    scaler = Scaler(replace(QUICK, most=1), how, places(1), Seen(PoolView(0.0, queued=9)), lock)
    async with scaling(scaler, lock) as task:
        await hangs(scaler)
        (process,) = scaler.members
        if stopped:
            scaler.stop()
        else:
            scaler._settings = replace(QUICK, most=0)
        await eventually(lambda: process.exit_code == -signal.SIGKILL, what="it is killed")
        await eventually(lambda: task.done() == stopped, what="the scaler goes on, or has ended")
        assert process.place.failures == 0  # it was to leave


async def test_the_lock_is_kept_until_the_last_worker_has_left(db: Redis, tmp_path: Path) -> None:
    lock = ScalerLock(db, "default", 0.5)
    scaler = Scaler(replace(QUICK, most=1), means(tmp_path, HANGS), places(1), Seen(PoolView(0.0, queued=9)), lock)
    async with scaling(scaler, lock) as task:
        await hangs(scaler)
        scaler.stop()
        left_ms = list[int]()

        async def is_kept() -> bool:
            left_ms.append(await db.pttl(Keys("default").scaler))
            return len(left_ms) > 3 and left_ms[-1] > left_ms[-2] > 0

        await eventually(lambda: scaler.draining, what="it drains")
        for _ in range(3):
            await eventually(is_kept, what="the lock is renewed")
        scaler.kill_all()
        await eventually(task.done, what="the scaler has ended")


async def test_a_worker_that_cannot_be_started_has_failed(lock: ScalerLock, tmp_path: Path) -> None:
    """As when the disk of the logs is full: the workers that run go on."""
    seen = Seen(PoolView(0.0, queued=9))
    scaler = Scaler(replace(QUICK, least=1, most=1), means(tmp_path, SLEEPS), places(2), seen, lock)
    async with scaling(scaler, lock) as task:
        await eventually(lambda: len(scaler.members) == 1, what="one was started")
        scaler.members[0].served_at = 0.0
        scaler._means = means(tmp_path / "gone", SLEEPS)
        scaler._settings = replace(QUICK, least=2, most=2)
        await eventually(lambda: any(one.given_up for one in scaler._places), what="the other place is given up")
        assert len(scaler._present()) == 1
        scaler.members[0].kill()  # one that has served is tried again, however often others have failed
        with pytest.raises(CrashLoop, match=r"The last one cannot be started: .*No such file"):
            await task


async def test_the_first_signal_does_not_cut_a_drain_that_has_begun_already(lock: ScalerLock, tmp_path: Path) -> None:
    seen = Seen(PoolView(0.0, queued=9))
    scaler = Scaler(replace(QUICK, least=1, most=1), means(tmp_path, HANGS), places(3), seen, lock)
    async with scaling(scaler, lock) as task:
        await hangs(scaler)
        scaler._means = means(tmp_path, FAILS)
        scaler._settings = replace(QUICK, least=3)
        await eventually(lambda: scaler.draining, what="others fail again and again")
        scaler.stop()
        await asyncio.wait([task], timeout=0.0)
        assert scaler.members[0].exit_code is None
        scaler.stop()
        with pytest.raises(CrashLoop):
            await task


async def test_restarts_wait_twice_as_long_each_time() -> None:
    (place,) = places(1)
    assert [place.failed(100.0, 1.0) for _ in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert place.not_before == 160.0
    assert place.given_up


async def test_without_an_answer_of_redis_nothing_starts_or_leaves(lock: ScalerLock, tmp_path: Path) -> None:
    seen = Seen(PoolView(0.0, queued=9))
    scaler = Scaler(replace(QUICK, most=1), means(tmp_path, SLEEPS), places(1), seen, lock)
    async with scaling(scaler, lock):
        await eventually(lambda: len(scaler.members) == 1, what="one was started")
        (process,) = scaler.members
        seen.view = None
        scaler._settings = replace(QUICK, most=0)
        process.kill()
        await eventually(lambda: not scaler.members, what="it is forgotten")
        assert (process.place.failures, scaler._crashes) == (0, 0)  # without Redis every worker ends
        for _ in range(3):
            await scaler.step()
        assert scaler.members == []


async def test_the_worker_with_the_least_in_flight_leaves_first(lock: ScalerLock, tmp_path: Path) -> None:
    seen = Seen(PoolView(0.0, queued=9))
    scaler = Scaler(replace(QUICK, least=3), means(tmp_path, SLEEPS), places(3), seen, lock)
    async with scaling(scaler, lock):
        await eventually(lambda: len(scaler.members) == 3, what="three were started")
        pids = [one.pid for one in scaler.members]
        seen.workers = tuple(
            status(f"w{pid}", pid=pid, host=socket.gethostname(), held=held)
            for pid, held in zip(pids, (5, 1, 3), strict=True)
        )  # fmt: skip
        seen.view = PoolView(0.0, running=9, slots=12, serving=3)
        scaler._settings = replace(QUICK, least=2, most=2)
        await eventually(lambda: len(scaler.members) == 2, what="one has left")
        assert {one.pid for one in scaler.members} == {pids[0], pids[2]}


async def test_workers_of_others_count_and_are_left_alone(lock: ScalerLock, tmp_path: Path) -> None:
    seen = Seen(PoolView(0.0, queued=1, running=64, slots=64, serving=2, starting=1))
    scaler = Scaler(replace(QUICK, least=1), means(tmp_path, SLEEPS), places(3), seen, lock)
    await lock.take()
    try:
        for _ in range(3):
            await scaler.step()
        assert len(scaler.members) == 1  # the least; three of others are there
    finally:
        await scaler._drain_all()


async def test_a_pool_has_one_scaler(db: Redis, broker: Broker) -> None:
    one, other = ScalerLock(db, "default", 60.0), ScalerLock(db, "default", 60.0, patience_s=0.1)
    await one.take()
    await one.keep()
    with pytest.raises(ConfigError, match="scales this pool already"):
        await other.take()
    await db.delete(broker.keys.scaler)  # as when its time is over, after a kill
    await other.take()
    with pytest.raises(ConfigError, match="scales this pool already"):
        await one.keep()
    await other.release()
    await one.keep()  # as when Redis had lost it
    assert 0 < await db.pttl(broker.keys.scaler) <= 60_000


async def test_rights_of_a_worker_and_an_operator_are_enough(redis_server: EmbeddedRedis) -> None:
    url = create(redis_server, "worker", "mine", LINES["operator"].replace("reset", "").replace("POOL", "mine"))
    async with connect(url, pool="mine") as redis:
        lock = ScalerLock(redis, "mine", 5.0)
        await lock.take()
        await lock.keep()
        assert await PoolWatch(redis, "mine").look() is not None
        await lock.release()


async def test_a_scaler_that_is_killed_leaves_no_worker(redis_db: str, broker: Broker, tmp_path: Path) -> None:
    environment = {**os.environ, **scripted_worker.environment(redis_db)}
    scaler = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "support.pools.scaler_process", str(tmp_path), env=environment, start_new_session=True
    )
    try:
        (worker,) = await eventually(broker.workers, 60, "its worker joins")
        process = psutil.Process(worker.pid)
        scaler.kill()
        await scaler.wait()

        async def left() -> bool:
            return not await broker.workers()

        await eventually(left, 60, "the worker has left")
        await eventually(lambda: is_gone(process), 60, "its process has ended")
    finally:
        with suppress(ProcessLookupError):
            os.killpg(scaler.pid, signal.SIGKILL)


PARENT = """
import os, subprocess, sys
leave = [sys.executable, "-I", "-S", sys.argv[1], str(os.getpid()), sys.argv[2], sys.executable, "-c", sys.argv[3]]
print(subprocess.Popen(leave, start_new_session=True).pid, flush=True)
input()
"""
WITH_A_CHILD = f"""
import signal, subprocess, sys
print(subprocess.Popen([sys.executable, "-c", {DEAF!r}], stdout=subprocess.DEVNULL).pid, flush=True)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.sigwait({{signal.SIGUSR1}})
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal at a parent's death is Linux'")
@pytest.mark.parametrize("dies", ["scaler", "worker", "worker by itself"])
async def test_a_deaf_worker_and_what_it_has_started_go_too(dies: str) -> None:
    told = [sys.executable, "-c", PARENT, str(LEAVE), "0.5" if dies == "scaler" else "600", WITH_A_CHILD]
    pipe = asyncio.subprocess.PIPE
    scaler = await asyncio.create_subprocess_exec(*told, stdin=pipe, stdout=pipe)
    worker, child = [psutil.Process(int(await scaler.stdout.readline())) for _ in range(2)]
    try:
        if dies == "scaler":
            scaler.kill()
        else:
            worker.send_signal(signal.SIGKILL if dies == "worker" else signal.SIGUSR1)
        await eventually(lambda: is_gone(worker) and is_gone(child), 60, "both have ended")
    finally:
        with suppress(ProcessLookupError):
            scaler.kill()
        await scaler.wait()


@pytest.mark.parametrize(
    ("most", "gpus", "found"),
    [(2, (), ["", ""]), (2, ("0", "1", "2"), ["0", "1"]), (2, ("0+1", "2+3"), ["0,1", "2,3"])],
)
def test_places_have_their_gpus(most: int, gpus: tuple[str, ...], found: list[str]) -> None:
    assert [one.gpus for one in places(most, gpus)] == found


@pytest.mark.parametrize(
    ("most", "gpus", "field"), [(3, ("0", "1"), "max"), (2, ("0", "0"), "gpus"), (1, ("",), "gpus")]
)
def test_places_without_a_gpu_are_refused(most: int, gpus: tuple[str, ...], field: str) -> None:
    with pytest.raises(InvalidField, match=field):
        places(most, gpus)
