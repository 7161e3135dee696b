"""Bulk replay as an operation: a worker that is killed half-way, one that goes on, and what belongs together."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.pools.operations import Gated, WorkerProcess, alive, children
from support.pools.pool import eventually, worker

from rolloutmq.messages import ConfigError, GenerateJob, InvalidField, connect, new_id
from rolloutmq.messages.journal import Journal
from rolloutmq.ops.operations import run_operation
from rolloutmq.ops.operations.catalog import checked
from rolloutmq.ops.operations.rq_queue import OperationQueue
from rolloutmq.producer import RolloutClient
from rolloutmq.worker.scripted.engine import ScriptedEngine

JOBS = 500
LOAD = "rmq:{default}:load"


async def record(url: str, folder: Path, count: int) -> list[str]:
    """Ids of jobs that ran in a pool, with a journal."""
    jobs = [
        GenerateJob(id=new_id(), token_ids=[5 + i % 7, 6], sampling={"temperature": 0.0, "max_new_tokens": 4})
        for i in range(count)
    ]
    engine = ScriptedEngine(echo=True)
    async with worker(url, engine=engine, max_running=256), RolloutClient(url, journal=folder) as client:
        await client.submit_many(jobs)
        assert [outcome.ok async for outcome in client.results(timeout=60)] == [True] * count
    return [job.id for job in jobs]


def verdicts(out: Path) -> list[dict[str, Any]]:
    lines = out.read_bytes().split(b"\n") if out.exists() else []
    return [json.loads(line) for line in lines[1:-1]]


async def test_killed_half_way_each_job_is_replayed_exactly_once(
    queue: OperationQueue, redis_db: str, tmp_path: Path
) -> None:
    journal, out, engine = tmp_path / "journal", tmp_path / "out.jsonl", Gated(JOBS // 2)
    jobs = await record(redis_db, journal, JOBS)
    async with connect(redis_db) as db, worker(redis_db, engine=engine, max_running=64):
        before = int(await db.hget(LOAD, "accepted"))
        run_id = queue.submit("replay", {"journal": str(journal), "out": str(out)})
        first = await asyncio.to_thread(WorkerProcess, queue, redis_db)
        try:
            # Half is answered, and the others are in the pool: it is in the midst of everything.
            await eventually(lambda: len(verdicts(out)) > 100 and engine.free < 0)
            (child,) = children(first.pid)
        finally:
            first.kill()
        await eventually(lambda: not alive(child))
        assert queue.run(run_id).state == "started"
        assert 100 < (cut := len(verdicts(out))) <= JOBS // 2
        with out.open("ab") as file:
            file.write(b'{"job": "cut o')  # as if it had been killed while it wrote
        registry = queue.rq.started_job_registry
        (member,) = queue.redis.zrange(registry.key, 0, -1)
        queue.redis.zadd(registry.key, {member: 1})  # as if its last sign of life was long ago
        engine.gate.set()
        second = await asyncio.to_thread(WorkerProcess, queue, redis_db)
        try:
            run = await eventually(lambda: (run := queue.run(run_id)).over and run, timeout=90)
        finally:
            second.kill()
        assert int(await db.hget(LOAD, "accepted")) - before == JOBS
        assert int(await db.hget(LOAD, "jobs")) == 0
    assert (run.state, run.error) == ("finished", "")
    assert (run.result["samples"], run.result["same"]) == (JOBS, JOBS)
    assert (run.done, run.total) == (JOBS, JOBS)
    written = verdicts(out)
    assert sorted(line["job"] for line in written) == sorted(jobs)
    assert cut < JOBS


async def test_a_replay_goes_on_in_its_own_file_only(redis_db: str, tmp_path: Path) -> None:
    journal, out = tmp_path / "journal", tmp_path / "out.jsonl"
    jobs = await record(redis_db, journal, 4)
    params = {"journal": str(journal), "out": str(out), "where": "tokens == 4", "jobs": ",".join(jobs[:3])}

    async def run(**more: Any) -> dict[str, Any]:
        at = {"redis_url": redis_db, "pool": "default"}
        return await run_operation("replay", params | more, report=lambda _: None, **at)

    async with worker(redis_db, engine=ScriptedEngine(echo=True)):
        done = await run()
        assert (done["samples"], done["same"], done["problems"]) == (3, 3, [])
        with Journal(journal) as later:
            later.note(jobs[0], reward=1.0)
        assert await run() == done  # it is complete; nothing is generated again
        assert len(verdicts(out)) == 3
        with pytest.raises(ConfigError, match="was begun with limit=1000, not 2; give the same again"):
            await run(limit=2)
        (tmp_path / "notes.txt").write_text("somebody's notes\nwithout an end")
        with pytest.raises(ConfigError, match="no file of replay"):
            await run(out=str(tmp_path / "notes.txt"))
        assert (tmp_path / "notes.txt").read_text() == "somebody's notes\nwithout an end"
        limited = await run(limit=2, jobs=(), out=str(tmp_path / "two.jsonl"))
        assert limited["samples"] == 2


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"journal": "/j"}, "out="),
        ({"journal": "j", "out": "/o"}, "journal='j'"),
        ({"journal": "/j", "out": "/o", "where": "reward <"}, "where='reward <'"),
        ({"journal": "/j", "out": "/o", "limit": 0}, "limit=0"),
    ],
)
def test_what_cannot_be_replayed_is_refused_before_it_is_queued(params: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidField, match="".join(["^", says])):
        checked("replay", params)


def test_an_operations_worker_imports_neither_torch_nor_an_engine() -> None:
    heavy = ["torch", "sglang", "transformers"]
    script = (
        "import sys; from rolloutmq.ops.operations.catalog import operations; operations();"
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"
