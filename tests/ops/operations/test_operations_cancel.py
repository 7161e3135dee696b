"""`ops cancel`: a queued operation is removed, a running one is stopped, and neither is started again."""

from __future__ import annotations

import json
import os
import signal

import pytest
from support.pools.operations import DEAD, WorkerProcess, alive, children, load_jobs, until, work, write_letters
from typer.testing import CliRunner

from rolloutmq.messages import InvalidField
from rolloutmq.ops.cli.main import app
from rolloutmq.ops.operations.rq_job import OperationJob
from rolloutmq.ops.operations.rq_queue import OperationQueue

FULL = {"jobs": 10**7}
"""With so many open jobs a pool is busy, and `dead-requeue` waits as long as it is told to."""


def test_a_queued_operation_is_removed(queue: OperationQueue, redis_db: str) -> None:
    run_id, kept = queue.submit("dead-requeue", {}), queue.submit("audit-broker", {"pause_s": 0.01})
    write_letters(queue, 1)
    assert queue.cancel(run_id).state == "queued"
    assert queue.run(run_id).state == "cancelled"
    assert {run.id: run.state for run in queue.runs()} == {run_id: "cancelled", kept: "queued"}
    assert work(queue, redis_db)
    assert (queue.run(run_id).state, queue.run(kept).state) == ("cancelled", "finished")
    assert queue.redis.xlen(DEAD) == 1
    assert queue.redis.ttl(OperationJob.key_for(run_id)) > 0
    assert queue.redis.zscore(f"rq:failed:{queue.name}", run_id) is not None  # from where RQ removes it in time


def test_a_running_operation_is_stopped_and_not_tried_again(queue: OperationQueue, redis_db: str) -> None:
    write_letters(queue, 1)
    queue.redis.hset("rmq:{default}:load", mapping=FULL)
    run_id = queue.submit("dead-requeue", {"patience_s": 3600})
    with WorkerProcess(queue, redis_db) as running:
        until(lambda: "waiting" in queue.run(run_id).message)
        assert queue.cancel(run_id).state == "started"
        run = until(lambda: (run := queue.run(run_id)).over and run)
        assert (run.state, run.error, run.result) == ("cancelled", "", None)
        assert alive(running.pid)
        nothing = queue.submit("audit-broker", {"pause_s": 0.01})
        until(lambda: queue.run(nothing).state == "finished")  # had it been queued again, it would run before this one
    assert queue.run(run_id).state == "cancelled"
    assert queue.redis.xlen(DEAD) == 1
    assert queue.redis.ttl(OperationJob.key_for(run_id)) > 0


def test_one_whose_process_died_is_not_started_again(queue: OperationQueue, redis_db: str) -> None:
    write_letters(queue, 1)
    queue.redis.hset("rmq:{default}:load", mapping=FULL)
    run_id = queue.submit("dead-requeue", {"patience_s": 3600})
    with WorkerProcess(queue, redis_db) as running:
        until(lambda: "waiting" in queue.run(run_id).message)
        (child,) = children(running.pid)
        os.kill(child, signal.SIGSTOP)  # it cannot look
        queue.cancel(run_id)
        os.kill(child, signal.SIGKILL)
        run = until(lambda: (run := queue.run(run_id)).over and run)
    assert run.state == "cancelled"
    assert load_jobs(queue) == FULL["jobs"]


def test_what_is_over_stays_as_it_is(queue: OperationQueue, redis_db: str) -> None:
    run_id = queue.submit("audit-broker", {"pause_s": 0.01})
    assert work(queue, redis_db)
    assert queue.cancel(run_id).state == "finished"
    assert queue.run(run_id).state == "finished"
    with pytest.raises(InvalidField, match="id="):
        queue.cancel("nonsense")


def test_nobody_ends_a_worker_by_a_message(queue: OperationQueue, redis_db: str) -> None:
    """RQ's workers obey `shutdown` and `kill-horse` from a channel that anybody can publish to."""
    with WorkerProcess(queue, redis_db):
        assert queue.redis.pubsub_channels("rq:*") == []


def test_the_command(queue: OperationQueue, redis_db: str) -> None:
    run_id = queue.submit("audit-broker", {})
    ended = CliRunner().invoke(app, ["ops", "cancel", run_id, "--redis", redis_db])
    assert (ended.exit_code, ended.stdout) == (0, f"{run_id} cancelled\n")
    again = CliRunner().invoke(app, ["ops", "cancel", run_id, "--redis", redis_db, "--json"])
    assert (again.exit_code, json.loads(again.stdout)) == (1, {"id": run_id, "was": "cancelled"})
    watched = CliRunner().invoke(app, ["ops", "watch", run_id, "--redis", redis_db])
    assert (watched.exit_code, watched.stderr) == (1, "cancelled\n")
    unknown = CliRunner().invoke(app, ["ops", "cancel", "nonsense", "--redis", redis_db])
    assert unknown.exit_code == 2
