"""Workers as jobs of a real Slurm: from nothing to four and back, pre-empted, requeued, refused, and found again."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from redis.asyncio import Redis
from support.pools import scripted_worker
from support.pools.pool import check_scripted, eventually, replies, wait_replies
from support.pools.scaling import Seen, scaling
from support.slurm import Cluster, cluster, needs_slurm
from support.specimens.messages import job
from typer.testing import CliRunner

from rolloutmq.messages import Broker, SamplingParams
from rolloutmq.ops.cli import app
from rolloutmq.ops.metrics import PoolWatch
from rolloutmq.ops.scale import CrashLoop, Means, PoolView, Scaler, ScalerLock, ScaleSettings, Slurm, places
from rolloutmq.producer import RolloutClient

pytestmark = needs_slurm
NAME = "rolloutmq-tests"
SETTINGS = ScaleSettings(least=0, most=4, target_s=0.2, stabilise_s=2.0, startup_s=0.0)
WORKS = {"tokens_per_s": 100.0, "max_running": 4, "prefetch": 0, "lease_s": 4.0, "drain_s": 1.0}


@pytest.fixture(autouse=True)
def _told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("slurm")) as found:
        yield found


def works(slurm: Cluster, **options: Any) -> Path:
    return slurm.template(
        f"srun --unbuffered {sys.executable} -m support.pools.scripted_worker '{json.dumps(WORKS | options)}'"
    )


def site(slurm: Cluster, template: Path, url: str = "") -> Slurm:
    return Slurm(template, [], {**slurm.environment, **scripted_worker.environment(url)}, NAME)


@pytest.fixture
def lock(db: Redis) -> ScalerLock:
    return ScalerLock(db, "default", 15.0)


def serving(scaler: Scaler) -> int:
    return sum(one.served_at is not None and not one.leaving for one in scaler.members)


async def check_once(broker: Broker, ids: list[str]) -> None:
    """Each job has its result, once, with the tokens that it would have anywhere."""
    found = await wait_replies(broker, len(ids), timeout=240)
    assert sorted(one.outcome.job_id for one in found) == sorted(ids)
    for one in found:
        check_scripted(one.outcome, 3)


async def test_from_nothing_to_four_and_back_while_nodes_are_taken(
    slurm: Cluster, redis_db: str, db: Redis, broker: Broker, lock: ScalerLock
) -> None:
    scaler = Scaler(
        SETTINGS, Means(site(slurm, works(slurm), redis_db), every_s=0.2), places(4), PoolWatch(db, "default"), lock
    )
    jobs = [job(sampling=SamplingParams(max_new_tokens=600)) for _ in range(48)]
    async with scaling(scaler, lock, 120):
        assert scaler.members == []
        await broker.enqueue(jobs)
        await eventually(lambda: serving(scaler) == 4, 60, "four serve")
        slurm.urgent(2, 1)
        slurm.ask("scontrol", "requeue", slurm.jobs("RUNNING", name=NAME)[-1])
        await eventually(lambda: serving(scaler) < 3, 60, "nodes are taken away")
        await check_once(broker, [one.id for one in jobs])
        assert (await broker.load()).redelivered >= 3
        await eventually(lambda: not scaler.members, 60, "all have left")
        assert scaler._crashes == 0
        assert slurm.jobs("PENDING", "RUNNING", name=NAME) == []


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("echo no such model; exit 3", r"(?s)5 workers in a row failed.*ended as FAILED.*no such model"),
        ("#SBATCH --partition=none", r"cannot be started: sbatch: .*partition"),
    ],
)
async def test_workers_that_cannot_work_are_said_and_stopped(
    slurm: Cluster, lock: ScalerLock, script: str, told: str
) -> None:
    means = Means(site(slurm, slurm.template(script)), every_s=0.1, pause_s=0.01)
    scaler = Scaler(SETTINGS, means, places(4), Seen(PoolView(0.0, queued=9)), lock)
    async with scaling(scaler, lock, 120) as task:
        with pytest.raises(CrashLoop, match=told):
            await task


async def test_a_scaler_that_was_killed_leaves_jobs_that_the_next_one_takes_over(
    slurm: Cluster, redis_db: str, db: Redis, lock: ScalerLock, caplog: pytest.LogCaptureFixture
) -> None:
    watch, means = PoolWatch(db, "default"), Means(site(slurm, works(slurm), redis_db), every_s=0.2)
    first = Scaler(replace(SETTINGS, least=2), means, places(4), watch, lock)
    await lock.take()
    while serving(first) < 2:  # and then no word of it
        await first.step()
        await first._pause()
    running = slurm.jobs("RUNNING", name=NAME)
    await lock.release()
    second = Scaler(
        replace(SETTINGS, least=2), Means(site(slurm, works(slurm), redis_db), every_s=0.2), places(4), watch, lock
    )
    async with scaling(second, lock, 120):
        await eventually(lambda: serving(second) == 2, 60, "it knows them")
        assert slurm.jobs("PENDING", "RUNNING", name=NAME) == running
        assert caplog.text.count("was there already") == 2
        second._settings = replace(SETTINGS, most=0)
        await eventually(lambda: not second.members, 60, "they have left")
    assert slurm.jobs("PENDING", "RUNNING", name=NAME) == []


async def test_a_job_that_waits_says_for_what_and_is_cancelled_first(
    slurm: Cluster, redis_db: str, db: Redis, lock: ScalerLock, caplog: pytest.LogCaptureFixture
) -> None:
    slurm.urgent(3, 600)
    await eventually(lambda: len(slurm.jobs("RUNNING")) == 3, 60, "three nodes are taken")
    watch, means = PoolWatch(db, "default"), Means(site(slurm, works(slurm), redis_db), every_s=0.2)
    scaler = Scaler(replace(SETTINGS, least=2), means, places(4), watch, lock)
    try:
        async with scaling(scaler, lock, 120):
            await eventually(lambda: serving(scaler) == 1, 60, "one serves")
            await eventually(lambda: re.search(r"waits in Slurm's queue: (Resources|Priority)", caplog.text), 60, "why")
            scaler._settings = replace(SETTINGS, least=1, most=1)
            await eventually(lambda: len(scaler.members) == 1, 60, "one has left")
            assert serving(scaler) == 1
    finally:
        slurm.ask("scancel", "--partition=urgent", "--user=root")


async def test_without_an_answer_of_slurm_nothing_is_changed(
    slurm: Cluster, lock: ScalerLock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    away = tmp_path / "slurm.conf"
    away.write_text(re.sub(r"SlurmctldPort=\d+", "SlurmctldPort=1", slurm.config.read_text()))
    nowhere = Slurm(works(slurm), [], {"SLURM_CONF": str(away), "SLURM_MSG_TIMEOUT": "1"}, NAME)
    scaler = Scaler(SETTINGS, Means(nowhere), places(4), Seen(PoolView(0.0, queued=9)), lock)
    assert not await scaler._look()
    assert "nothing is changed: squeue" in caplog.text


async def test_the_command_line_runs_a_pool_whose_workers_are_jobs(slurm: Cluster, tmp_path: Path) -> None:
    said, logs = tmp_path / "said", tmp_path / "logs"
    flags = ["--on", "slurm", "--template", str(works(slurm)), "--workers", "2", "--logs", str(logs)]
    flags += ["--port", "0", "--exporter-port", "0", "--gateway-port", "0", "--model", "scripted"]
    environment = {**os.environ, **slurm.environment, **scripted_worker.environment("")}
    with said.open("wb") as out:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "support.pools.scaled_cli", "up", *flags, stdout=out, stderr=out, env=environment
        )
    try:
        await eventually(lambda: "ready: 2 serve" in said.read_text(), 90, "all serve")
        url, mode = (logs / "redis-url").read_text(), (logs / "redis-url").stat().st_mode
        assert (mode & 0o777, url.startswith("redis://:")) == (0o600, True)
        password = url.split("@")[0].removeprefix("redis://:")
        assert password not in said.read_text()
        assert all(password not in " ".join(it.info["cmdline"] or ()) for it in psutil.process_iter(["cmdline"]))
        async with RolloutClient(url) as client:
            (group,) = await client.generate([[1, 2, 3]], SamplingParams(max_new_tokens=8))
            assert len(group.results[0].token_ids) == 8
    finally:
        process.send_signal(signal.SIGINT)
        await process.wait()
    assert process.returncode == 0, said.read_text()
    assert slurm.jobs("PENDING", "RUNNING") == []


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--on", "slurm"], "--template"),
        (["--on", "slurm", "--template", "/none"], "--template"),
        (["--template", "/none"], "--on slurm"),
        (["--on", "slurm", "--gpus", "0"], "--gpus"),
    ],
)
def test_flags_that_do_not_fit_are_refused(flags: list[str], told: str) -> None:
    found = CliRunner().invoke(app, ["scale", "--redis", "redis://127.0.0.1:1/0", "--max", "1", *flags, "--model", "x"])
    assert found.exit_code == 2
    assert told in found.output


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_what_pre_emptions_waste(
    slurm: Cluster, redis_db: str, db: Redis, broker: Broker, lock: ScalerLock
) -> None:
    """Two of four nodes are taken every 30 s, for five minutes: nothing is lost, and what was generated is used."""
    template = works(slurm, drain_s=3.0, lease_s=10.0, tokens_per_s=150.0)
    means = Means(site(slurm, template, redis_db), every_s=1.0)
    scaler = Scaler(replace(SETTINGS, least=4), means, places(4), PoolWatch(db, "default"), lock)
    ids, before = list[str](), {path: path.read_text() for path in slurm.folder.glob("worker-*.log")}
    async with scaling(scaler, lock, 120):
        await eventually(lambda: serving(scaler) == 4, 60, "four serve")

        async def fed(until: float) -> None:
            while asyncio.get_running_loop().time() < until:
                if sum((await broker.load()).queued) < 16:
                    jobs = [job(sampling=SamplingParams(max_new_tokens=2000)) for _ in range(8)]
                    await broker.enqueue(jobs)
                    ids.extend(one.id for one in jobs)
                await asyncio.sleep(1.0)  # how often more jobs come

        for _ in range(10):
            slurm.urgent(2, 2)
            await fed(asyncio.get_running_loop().time() + 30.0)
        await check_once(broker, ids)
        samples = sum(len(one.outcome.token_ids) for one in await replies(broker))
        assert scaler._crashes == 0
    logs = [path.read_text().removeprefix(before.get(path, "")) for path in slurm.folder.glob("worker-*.log")]
    generated = sum(int(count) for text in logs for count in re.findall(r"^generated (\d+)", text, re.MULTILINE))
    started = sum(text.count("joined pool") for text in logs)
    ended = sum(len(re.findall(r"^generated ", text, re.MULTILINE)) for text in logs)
    print(f"{len(ids)} jobs, {started} starts, {samples:,} tokens, {generated - samples:,} more were generated")
    assert (ended, started > 14) == (started, True)
    assert samples <= generated <= samples * 1.02
