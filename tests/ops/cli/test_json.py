"""`--json` of the commands that change something or answer: one JSON value a line, and nothing else on stdout."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
from support.pools.operations import write_letters
from support.pools.pool import eventually, worker
from support.specimens.byte_tokenizer import Bytes
from support.specimens.messages import job
from typer.testing import CliRunner

from rolloutmq.messages import Broker, connect
from rolloutmq.ops.cli.main import app
from rolloutmq.ops.operations.rq_queue import OperationQueue
from rolloutmq.worker.scripted.engine import ScriptedEngine


def told(*arguments: str) -> list[Any]:
    """The lines of a command's stdout."""
    done = CliRunner().invoke(app, [*arguments, "--json"])
    assert done.exit_code in {0, 1}, done.output
    return [json.loads(line) for line in done.stdout.splitlines()]


async def queue_jobs(url: str, *jobs: Any) -> None:
    async with connect(url) as redis:
        await Broker(redis, "default").enqueue(jobs)


def test_cancel_and_replies(redis_db: str) -> None:
    one, two, at = job(), job(), ("--redis", redis_db)
    asyncio.run(queue_jobs(redis_db, one, two))
    assert told("cancel", one.id, "0" * 32, *at) == [{one.id: "cancelled", "0" * 32: "was unknown"}]
    assert told("cancel", "--client", "client", *at) == [{"cancelled": 1}]
    ((waiting,),) = told("replies", "list", *at)
    assert (waiting["client"], waiting["results"], waiting["open_jobs"]) == ("client", 2, 0)
    assert told("replies", "drop", "client", "--yes", *at) == [{"dropped": 2}]


async def test_partial_publishes_what_there_is(redis_db: str) -> None:
    long = job(n=1, sampling={"max_new_tokens": 1 << 16})
    async with worker(redis_db, engine=ScriptedEngine(tokens_per_s=50.0)) as running:
        await queue_jobs(redis_db, long)
        await eventually(lambda: running.generation.running > 0)
        said = await asyncio.to_thread(told, "cancel", long.id, "--partial", "--redis", redis_db)
    assert said == [{long.id: "stopped"}]


def test_dead_requeue_and_drop(redis_db: str, queue: OperationQueue) -> None:
    (good, other), (bad,) = write_letters(queue, 2), write_letters(queue, 1, payload=b"?")
    at = ("--yes", "--redis", redis_db)
    (done,) = told("dead", "requeue", good, bad, *at)
    assert (done["requeued"], done["refused"], list(done["jobs"])) == (1, 1, [good])
    assert [one["entry_id"] for one in done["refusals"]] == [bad]
    (dropped,) = told("dead", "drop", other, "1-1", *at)
    assert (dropped["dropped"], [one["entry_id"] for one in dropped["refusals"]]) == (1, ["1-1"])
    (result,) = told("dead", "requeue", "--all", *at)
    assert (result["requeued"], result["refused"]) == (0, 1)


async def test_generate(redis_db: str) -> None:
    ask = ("generate", "--token-ids", "5,6,7", "--max-new-tokens", "4", "--redis", redis_db)
    async with worker(redis_db, tokenizer=Bytes(), engine=ScriptedEngine(echo=True)):
        (whole,) = await asyncio.to_thread(told, *ask)
        samples = await asyncio.to_thread(told, *ask, "--n", "2")
        deltas = await asyncio.to_thread(told, *ask, "--stream")
    assert (whole["token_ids"], whole["finish_reason"], whole["versions"]) == ([5, 6, 7, 5], "length", [0])
    assert [one["sample"] for one in samples] == [0, 1]
    assert [token for delta in deltas for token in delta["token_ids"]] == [5, 6, 7, 5]


async def test_scores_are_one_list(redis_db: str) -> None:
    async with worker(redis_db):
        options = ("--redis", redis_db, "--timeout", "20", "--ids")
        (scores,) = await asyncio.to_thread(told, "score", "--prompt", "1 2 3", *options, "10 11", "12")
    assert [one["tokens"] for one in scores] == [2, 1]
    assert np.isfinite([one["logprob"] for one in scores]).all()


def test_an_operations_id(redis_db: str, queue: OperationQueue) -> None:
    ((run_id,),) = (one.values() for one in told("ops", "run", "audit-broker", "--redis", redis_db))
    assert queue.run(run_id).state == "queued"
