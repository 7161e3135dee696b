"""What does not get in by way of RQ: functions, callbacks, pickles; records that cannot be read do not end a worker."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import msgpack
import pytest
from rq.exceptions import NoSuchJobError
from support.pools.operations import COMMAND, call, forge, work

from rolloutmq.messages import InvalidField
from rolloutmq.ops.operations.rq_job import ENTRY, MsgpackSerializer, OperationJob
from rolloutmq.ops.operations.rq_queue import OperationQueue, queue_name


@pytest.fixture
def marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that a forged job tries to make."""
    monkeypatch.setenv("MARK", str(tmp_path / "mark"))
    return tmp_path / "mark"


@cache
def zeros() -> bytes:
    """64 MiB, compressed; not made where tests are only collected."""
    return zlib.compress(b"\0" * (64 << 20))


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (os.environ["MARK"],)


FORGED: dict[str, Callable[[str], bytes]] = {
    "a function of the library": lambda mark: call("os.mkdir", [mark]),
    "a method of an object": lambda mark: call("format", [mark], instance="x"),
    "a function with the arguments of an operation": lambda mark: call("os.mkdir", ["audit-broker", {}]),
    "an instance with the right name": lambda mark: call(ENTRY, ["audit-broker", {}], instance="x"),
    "keyword arguments": lambda mark: call(ENTRY, ["audit-broker", {}], kwargs={"a": 1}),
    "a function of ours": lambda mark: call(
        "rolloutmq.ops.operations.run.run_here", ["audit-broker", {}, mark, "p", None]
    ),
    "an operation that is none": lambda mark: call(ENTRY, ["os.mkdir", {"path": mark}]),
    "parameters that are none": lambda mark: call(ENTRY, ["audit-broker", {"path": mark}]),
    "too few arguments": lambda mark: call(ENTRY, ["audit-broker"]),
    "a list for a name": lambda mark: call(["os.mkdir"], [mark]),
    "pickle": lambda mark: pickle.dumps(("os.mkdir", None, (mark,), {})),
    "a pickled bomb": lambda mark: pickle.dumps(Bomb()),
    "nothing": lambda mark: b"",
}


@pytest.mark.parametrize("kind", FORGED)
def test_a_forged_job_is_refused_and_the_worker_goes_on(
    kind: str, queue: OperationQueue, redis_db: str, marked: Path, caplog: pytest.LogCaptureFixture
) -> None:
    forged = forge(queue, FORGED[kind](str(marked)))
    honest = queue.submit("audit-broker", {"pause_s": 0.01})
    assert work(queue, redis_db)
    assert not marked.exists()
    run = queue.run(forged)
    assert run.state == "failed"
    assert "ForeignJob" in run.error or "InvalidField" in run.error
    assert queue.run(honest).state == "finished"


def test_a_refusal_is_in_the_log(redis_db: str, queue: OperationQueue, marked: Path) -> None:
    forged = forge(queue, call("os.mkdir", [str(marked)]))
    ended = subprocess.run(
        [*COMMAND, "ops", "worker", "--burst", "--redis", redis_db],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert f"refused: job {forged} names 'os.mkdir' and is no operation: it was not run" in ended.stderr


@pytest.mark.parametrize(
    "fields",
    [
        {"success_callback_name": "os.getcwd"},
        {"failure_callback_name": "os.getcwd", "data": zlib.compress(call("nothing"))},
        {"webhooks": json.dumps([{"url": "http://127.0.0.1:1", "job_status": "finished"}])},
        {"dependency_ids": json.dumps(["a"])},
        {"repeats_left": 5, "repeat_intervals": "[0]"},
        {"group_id": "g"},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_what_operations_do_not_use_of_rq_is_not_even_read(
    fields: dict[str, Any], queue: OperationQueue, redis_db: str
) -> None:
    run_id = forge(queue, call(ENTRY, ["audit-broker", {"pause_s": 0.01}]), **fields)
    record = OperationJob.fetch(run_id, connection=queue.redis, serializer=MsgpackSerializer)
    assert record.success_callback is record.failure_callback is record.stopped_callback is None
    assert (record.webhooks, record.dependency_ids, record.repeats_left, record.group_id) == ([], [], None, None)
    work(queue, redis_db)
    assert queue.run(run_id).state == ("failed" if "data" in fields else "finished")
    assert queue.redis.llen(f"rq:queue:{queue.name}") == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"status": "nonsense"},
        {"timeout": "soon"},
        {"created_at": "yesterday"},
        {"data": zeros},
        {"data": lambda: zlib.compress(zeros())},
        {"meta": b"\xc1"},
        {"meta": msgpack.packb({"progress": 7})},
    ],
    ids=["status", "timeout", "date", "bomb", "bomb in a bomb", "meta", "progress"],
)
def test_a_record_that_cannot_be_read_does_not_end_the_worker(
    fields: dict[str, Any], queue: OperationQueue, redis_db: str
) -> None:
    made = {name: value() if callable(value) else value for name, value in fields.items()}
    forge(queue, call(ENTRY, ["audit-broker", {}]), **made)
    honest = queue.submit("audit-broker", {"pause_s": 0.01})
    assert work(queue, redis_db)
    assert queue.run(honest).state == "finished"
    assert honest in [run.id for run in queue.runs()]
    assert work(queue, redis_db) is False


def test_a_bomb_is_not_unpacked(queue: OperationQueue) -> None:
    for fields in ({"data": zeros()}, {"meta": b"\0" * (2 << 20)}):
        with pytest.raises(NoSuchJobError, match="more than 1048576 bytes"):
            OperationJob.fetch(forge(queue, b"", **fields), connection=queue.redis, serializer=MsgpackSerializer)


def test_a_worker_of_rq_s_own_runs_no_operation(queue: OperationQueue, marked: Path) -> None:
    run_id = queue.submit("audit-broker", {})
    record = OperationJob.fetch(run_id, connection=queue.redis, serializer=MsgpackSerializer)
    with pytest.raises(Exception, match="ops worker"):
        record.perform()


def test_the_serializer_takes_plain_data_only() -> None:
    value = {"a": [1, 2.5, None, True, "x", b"y"]}
    assert MsgpackSerializer.loads(MsgpackSerializer.dumps(value)) == value
    for bad in (Bomb, object(), {"x": "y" * (2 << 20)}):
        with pytest.raises((TypeError, ValueError)):
            MsgpackSerializer.dumps(bad)
    for wire in (b"\xc7\x01\x05x", b"\xc1", b"\0" * (2 << 20), pickle.dumps(1)):
        with pytest.raises(Exception):  # noqa: B017, PT011 – RQ takes any for "cannot be read"
            MsgpackSerializer.loads(wire)


def test_pools_do_not_see_each_other(queue: OperationQueue, redis_db: str) -> None:
    run_id = queue.submit("audit-broker", {})
    with OperationQueue(redis_db, "other") as other:
        assert other.runs() == []
        with pytest.raises(InvalidField, match="an operation in the queue rmq-ops:other"):
            other.run(run_id)
    for bad in ("nonsense", "a:b", "../x", ""):
        with pytest.raises(InvalidField, match="id="):
            queue.run(bad)
    with pytest.raises(InvalidField, match="pool="):
        queue_name("a:b")
