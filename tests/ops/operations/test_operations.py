"""Operations as jobs of a real RQ worker: run, seen, repeated, cut off; and nothing else gets in."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import zlib
from typing import Any

import pytest
import redis
from support.pools.operations import DEAD, WorkerProcess, alive, call, children, load_jobs, until, work, write_letters
from typer.testing import CliRunner

from rolloutmq.messages import Broker, InvalidField, RedisUnavailable, connect
from rolloutmq.ops.cli.main import app
from rolloutmq.ops.operations.catalog import Context, checked, operation, operations
from rolloutmq.ops.operations.rq_job import ENTRY, MsgpackSerializer, OperationJob
from rolloutmq.ops.operations.rq_queue import OperationQueue


def load(url: str) -> Any:
    async def read() -> Any:
        async with connect(url) as db:
            return await Broker(db, "default").load()

    return asyncio.run(read())


def test_bulk_requeue_runs_and_its_result_is_kept(queue: OperationQueue, redis_db: str) -> None:
    write_letters(queue, 150)
    write_letters(queue, 2, cause="poison")
    (bad,) = write_letters(queue, 1, payload=b"?")
    run_id = queue.submit("dead-requeue", {"cause": "REFUSED"})
    waiting = queue.run(run_id)
    assert (waiting.state, waiting.params, waiting.over) == ("queued", {"cause": "REFUSED"}, False)
    assert work(queue, redis_db)
    run = queue.run(run_id)
    assert (run.state, run.error) == ("finished", "")
    assert run.result is not None
    assert (run.result["requeued"], run.result["refused"]) == (150, 1)
    assert run.result["refusals"][0]["entry_id"] == bad
    assert (run.done, run.total) == (151, 151)
    assert load(redis_db).open_jobs == 150
    assert queue.redis.xlen(DEAD) == 3
    assert [one.id for one in queue.runs()] == [run_id]
    assert 0 < queue.redis.ttl(OperationJob.key_for(run_id)) <= 86400
    # The whole job once more, as after a crash at its very end: nothing is left to do.
    again = OperationJob.fetch(run_id, connection=queue.redis, serializer=MsgpackSerializer)
    queue.rq.enqueue_job(again)
    assert work(queue, redis_db)
    assert load(redis_db).accepted == 150


def test_nothing_that_dies_meanwhile_is_requeued(queue: OperationQueue, redis_db: str) -> None:
    """A job that dies again while its letters are requeued would keep the operation busy for ever."""
    write_letters(queue, 100)
    newest = queue.redis.xrevrange(DEAD, count=1)[0][0].decode()
    write_letters(queue, 5)
    run_id = queue.submit("dead-requeue", {})
    record = OperationJob.fetch(run_id, connection=queue.redis, serializer=MsgpackSerializer)
    record.meta = {"notes": {"until": newest, "requeued": 7}}  # an earlier run began when there were but these
    record.save_meta()
    work(queue, redis_db)
    result = queue.run(run_id).result
    assert result is not None
    assert (result["requeued"], load(redis_db).open_jobs, queue.redis.xlen(DEAD)) == (107, 100, 5)


def test_a_busy_pool_is_waited_for_then_told(queue: OperationQueue, redis_db: str) -> None:
    write_letters(queue, 2)
    queue.redis.hset("rmq:{default}:load", mapping={"jobs": 10**7})
    run_id = queue.submit("dead-requeue", {"patience_s": 1.0})
    work(queue, redis_db)
    run = queue.run(run_id)
    assert (run.state, queue.redis.xlen(DEAD)) == ("failed", 2)
    assert run.error.startswith("PoolBusy: pool default: ")
    assert "Traceback" not in run.error
    assert "waiting" in run.message


@pytest.mark.slow
def test_killed_half_way_it_goes_on(queue: OperationQueue, redis_db: str) -> None:
    """SIGKILL of the worker takes its child along; the next worker starts the job again, which does the rest."""
    write_letters(queue, 3)
    first = WorkerProcess(queue, redis_db)
    write_letters(queue, 4000)
    run_id = queue.submit("dead-requeue", {})
    with first:
        seen = until(lambda: (run := queue.run(run_id)).done > 200 and run)  # progress, while it runs
        assert (seen.state, seen.total) == ("started", 4003)
        assert f"{seen.done} requeued" in seen.message
        (child,) = children(first.pid)
        first.kill()
        until(lambda: not alive(child))
    at = load_jobs(queue)
    assert 200 < at < 4003
    assert queue.run(run_id).state == "started"
    wip = queue.rq.started_job_registry
    (member,) = queue.redis.zrange(wip.key, 0, -1)
    queue.redis.zadd(wip.key, {member: 1})  # as if its last sign of life was long ago
    work(queue, redis_db)
    run = queue.run(run_id)
    assert run.state == "finished"
    assert (load(redis_db).accepted, queue.redis.xlen(DEAD)) == (4003, 0)


@pytest.mark.slow
def test_a_child_that_is_killed_is_replaced_with_its_notes(queue: OperationQueue, redis_db: str) -> None:
    """As by the kernel, out of memory: twice, because RQ itself would save the notes of the run before."""
    write_letters(queue, 6000)
    newest = queue.redis.xrevrange(DEAD, count=1)[0][0].decode()
    run_id = queue.submit("dead-requeue", {})
    with WorkerProcess(queue, redis_db) as running:
        for least in (200, 1500):
            until(lambda least=least: queue.run(run_id).done and load_jobs(queue) > least)  # type: ignore[misc]
            noted = meta(queue, run_id)["notes"]
            (child,) = children(running.pid)
            os.kill(child, signal.SIGKILL)
            until(lambda child=child: not alive(child))  # type: ignore[misc]
            assert meta(queue, run_id)["notes"]["requeued"] >= noted["requeued"] > 0
        write_letters(queue, 5)
        run = until(lambda: (run := queue.run(run_id)).over and run)
    assert (run.state, meta(queue, run_id)["notes"]["until"]) == ("finished", newest)
    assert (load(redis_db).accepted, queue.redis.xlen(DEAD)) == (6000, 5)


def meta(queue: OperationQueue, run_id: str) -> dict[str, Any]:
    record = OperationJob.fetch(run_id, connection=queue.redis, serializer=MsgpackSerializer)
    return dict(record.meta)


def test_a_redis_that_is_gone_is_tried_again(queue: OperationQueue) -> None:
    run_id = queue.submit("audit-broker", {})
    record = OperationJob.fetch(run_id, connection=queue.redis, serializer=MsgpackSerializer)
    record.serves = ("redis://127.0.0.1:1/0", "default")
    with pytest.raises(RedisUnavailable):
        record.perform()
    assert record.retries_left == 3


def test_progress_is_seen_at_a_bounded_rate_and_notes_at_once() -> None:
    seen: list[dict[str, Any]] = []
    context = Context(redis=None, pool="p", report=lambda facts: seen.append(json.loads(json.dumps(facts))))  # type: ignore[arg-type]
    for i in range(10_000):
        context.progress(i, 10_000, "x")
    assert len(seen) < 5
    context.note(until="1-0")
    context.progress(10_000, 10_000, now=True)
    assert seen[-2]["notes"] == seen[-1]["notes"] == {"until": "1-0"}
    assert seen[-1]["progress"] == {"done": 10_000, "total": 10_000, "message": ""}


@pytest.mark.parametrize(
    ("name", "params", "says"),
    [
        ("explode", {}, "operation='explode': one of audit-broker, dead-requeue"),
        ("audit-broker", {"colour": 1}, "colour=1: no parameter of audit-broker; it takes pause_s, most"),
        ("audit-broker", {"pause_s": 0}, "pause_s=0: Input should be greater than 0"),
        ("dead-requeue", {"reply_to": "a b"}, "reply_to='a b'"),
        ("dead-requeue", {"limit": "many"}, "limit='many'"),
        ("dead-requeue", [], "params="),
        (7, {}, "operation=7"),
    ],
)
def test_parameters_are_checked_before_anything_is_queued(name: Any, params: Any, says: str) -> None:
    with pytest.raises(InvalidField) as caught:
        checked(name, params)
    assert says in str(caught.value)


def test_an_operation_has_one_name_and_a_name_one_operation() -> None:
    async def audit_broker(context: Context) -> dict[str, Any]:
        return {}

    with pytest.raises(InvalidField, match="audit_broker has it"):
        operation()(audit_broker)
    assert all(one.help.endswith(".") for one in operations().values())


# --- the command line -----------------------------------------------------------------------------------------------


def test_run_list_watch_and_worker(queue: OperationQueue, redis_db: str) -> None:
    at = ["--redis", redis_db]
    submitted = CliRunner().invoke(app, ["ops", "run", "audit-broker", "--param", "pause_s=0.01", *at])
    assert (submitted.exit_code, "until you start  rolloutmq ops worker" in submitted.stderr) == (0, True)
    run_id = submitted.stdout.strip()
    shown = CliRunner().invoke(app, ["ops", "watch", run_id, "--timeout", "0", *at])
    assert shown.exit_code == 3
    assert "rolloutmq ops worker" in shown.stderr
    listed = json.loads(CliRunner().invoke(app, ["ops", "list", "--json", *at]).stdout)
    assert {"audit-broker", "dead-requeue", "replay"} <= {one["name"] for one in listed["operations"]}
    assert [(run["id"], run["state"]) for run in listed["runs"]] == [(run_id, "queued")]
    with WorkerProcess(queue, redis_db):
        quiet = CliRunner().invoke(app, ["ops", "run", "audit-broker", "--json", *at])
        assert (quiet.stderr, json.loads(quiet.stdout).keys()) == ("", {"id"})
        done = CliRunner().invoke(app, ["ops", "watch", run_id, *at])
        assert done.exit_code == 0, done.output
        assert json.loads(done.stdout)["violations"] == []
        queue.redis.set("rmq:{default}:odd", 1)
        found = CliRunner().invoke(app, ["ops", "run", "audit-broker", "--wait", "--param", "pause_s=0.01", *at])
        assert found.exit_code == 1
        assert json.loads(found.stdout)["violations"][0]["kind"] == "unknown_key"
    here = CliRunner().invoke(app, ["ops", "run", "audit-broker", "--here", "--param", "pause_s=0.01", *at])
    assert (here.exit_code, json.loads(here.stdout)["violations"][0]["key"]) == (1, "odd")
    text = CliRunner().invoke(app, ["ops", "list", *at]).stdout
    assert "finished" in text
    assert "patience_s: number, default 300" in text


def test_a_failed_operation_says_why(queue: OperationQueue, redis_db: str) -> None:
    run_id = queue.submit("audit-broker", {})
    queue.redis.hset(OperationJob.key_for(run_id), "data", zlib.compress(call(ENTRY, ["audit-broker", {"most": 0}])))
    work(queue, redis_db)
    shown = CliRunner().invoke(app, ["ops", "watch", run_id, "--redis", redis_db])
    assert shown.exit_code == 1
    assert "failed: InvalidField: most=0: Input should be greater than or equal to 1" in shown.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("run", "audit-broker", "--param", "colour=red"), "InvalidField: colour='red'"),
        (("run", "nothing"), "InvalidField: operation='nothing'"),
        (("run", "audit-broker", "--param", "nonsense"), "ConfigError: 'nonsense'"),
        (("run", "audit-broker", "--redis", "redis://127.0.0.1:1/0"), "RedisUnavailable"),
        (("list", "--redis", "redis://:secret@127.0.0.1:1/0"), "RedisUnavailable"),
        (("watch", "x", "--redis", "http://h"), "ConfigError"),
        (("list", "--redis", "redis+sentinel://:secret@h/main"), "name one with --ops-redis"),
        (("worker", "--pool", "a:b"), "InvalidField: pool='a:b'"),
    ],
)
def test_a_bad_setting_is_one_line(arguments: tuple[str, ...], says: str) -> None:
    ended = CliRunner().invoke(app, ["ops", *arguments])
    assert ended.exit_code == 2
    assert says in ended.stderr
    assert not any(word in ended.output + ended.stderr for word in ("Traceback", "secret"))


def test_signals_end_a_worker(queue: OperationQueue, redis_db: str) -> None:
    with WorkerProcess(queue, redis_db) as running:
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(20) == 0
    assert not queue.has_worker()
    with redis.Redis.from_url(redis_db) as db:
        assert all(key.startswith(b"rq:") for key in db.scan_iter())
