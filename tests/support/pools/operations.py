"""What the tests of operations share: workers, forged jobs, letters."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
from support.specimens.messages import job

from rolloutmq.messages import Keys, encode, new_id
from rolloutmq.ops.operations.rq_job import OperationJob
from rolloutmq.ops.operations.rq_queue import OperationQueue, OperationWorker
from rolloutmq.worker.engine import EngineOutput, EngineRequest
from rolloutmq.worker.scripted.engine import ScriptedEngine

COMMAND = [sys.executable, "-m", "rolloutmq.ops.entry"]
DEAD = Keys("default").dead


def work(queue: OperationQueue, url: str) -> bool:
    """What is queued, in a worker that forks. Its signal handlers do not stay with the tests."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return bool(OperationWorker(queue.redis, url, "default").work(burst=True))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def until(condition: Callable[[], Any], timeout: float = 90.0) -> Any:
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return value


def write_letters(queue: OperationQueue, count: int, cause: str = "refused", payload: bytes | None = None) -> list[str]:
    entries = []
    for _ in range(count):
        one = job()
        entry = {"id": one.id, "cause": cause, "error": "e", "host": "h", "attempts": 1, "at": 5000}
        entries.append(queue.redis.xadd(DEAD, entry | {"payload": encode(one) if payload is None else payload}))
    return [entry.decode() for entry in entries]


def forge(queue: OperationQueue, call_: bytes, /, **fields: Any) -> str:
    """A job as somebody would write it who can write to Redis."""
    job_id = new_id()
    record = {"data": zlib.compress(call_), "origin": queue.name, "created_at": "2026-01-01T00:00:00.000000Z"}
    record |= {"status": "queued", "timeout": "60"} | fields
    queue.redis.hset(OperationJob.key_for(job_id), mapping=record)
    queue.redis.rpush(f"rq:queue:{queue.name}", job_id)
    return job_id


def call(function: Any, args: Any = (), instance: Any = None, kwargs: Any = None) -> bytes:
    return bytes(msgpack.packb([function, instance, args, {} if kwargs is None else kwargs]))


class WorkerProcess:
    """`rolloutmq ops worker` in a process of its own."""

    def __init__(self, queue: OperationQueue, url: str) -> None:
        self.process = subprocess.Popen([*COMMAND, "ops", "worker", "--redis", url], stderr=subprocess.DEVNULL)
        self.pid = self.process.pid
        # RQ lists a worker a moment before it is ready for signals.
        until(lambda: queue.has_worker() and catches(self.pid, signal.SIGTERM))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


class Gated(ScriptedEngine):
    """Answers so many requests, and the others when the gate is opened."""

    def __init__(self, free: int) -> None:
        super().__init__(echo=True)
        self.gate, self.free = asyncio.Event(), free

    async def generate(self, request: EngineRequest) -> EngineOutput:
        self.free -= 1
        if self.free < 0:
            await self.gate.wait()
        return await super().generate(request)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler of its own for a signal."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return bool(int(lines["SigCgt"], 16) >> (number - 1) & 1)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the latter: reaped between open and read
        return False


def load_jobs(queue: OperationQueue) -> int:
    return int(queue.redis.hget("rmq:{default}:load", "jobs") or 0)
