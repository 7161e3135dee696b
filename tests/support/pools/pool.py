"""What the tests of a pool share: waiting for a condition, looking at all of Redis, workers inside this process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from redis.asyncio import Redis

from rolloutmq.messages import Broker, DeadLetter, RolloutResult, WorkerStatus, connect
from rolloutmq.messages.broker import Reply
from rolloutmq.messages.broker.dead_letters import DeadLetters
from rolloutmq.messages.redis import Keys
from rolloutmq.messages.redis.connection import BoundedRetry
from rolloutmq.worker.config import WorkerConfig
from rolloutmq.worker.generation import Generation
from rolloutmq.worker.scripted.engine import ScriptedEngine, scripted_logprob, scripted_token
from rolloutmq.worker.text.tokenizer import NoTokenizer, Tokenizer
from rolloutmq.worker.worker import Worker


async def eventually(condition: Callable[[], Any], timeout: float = 30.0, what: str = "") -> Any:
    """The condition's value (awaited if it can be) as soon as it is truthy; fails after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while True:
        value = condition()
        if isinstance(value, Awaitable):
            value = await value
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {timeout} s: {what or condition}"
        await asyncio.sleep(0.005)


async def runs(engine: ScriptedEngine, count: int | None = None) -> bool:
    """Whether the engine has requests; with `count`, so many."""
    here = (await engine.operate("kv_use", {}))["used"] // 64
    return here == count if count is not None else here > 0


def shard_with(broker: Broker, job_id: str) -> Broker:
    """The broker of the shard that has this job; in a pool with one shard, `broker`."""
    return next(part for part in broker.parts if part.has(job_id))


async def record(broker: Broker, job_id: str) -> dict[bytes, bytes]:
    """What Redis has of a job, by field."""
    part = shard_with(broker, job_id)
    found: dict[bytes, bytes] = await part.redis.hgetall(part.keys.job(job_id))
    return found


async def saved(broker: Broker, job_id: str, field: str = "k0") -> bool:
    """Whether this piece of the job's is in Redis, the first one of sample 0 by default."""
    return field.encode() in await record(broker, job_id)


async def change(broker: Broker, job_id: str, fields: Mapping[str, Any]) -> None:
    """Write into a job's record."""
    part = shard_with(broker, job_id)
    await part.redis.hset(part.keys.job(job_id), mapping=fields)


async def dump(redis: Redis, skip: tuple[str, ...] = ("bell", "wake", "clock")) -> dict[str, Any]:
    """Every key and its content, apart from keys that end with `skip` and the times until leases end."""
    read = {
        b"hash": redis.hgetall,
        b"set": redis.smembers,
        b"list": lambda key: redis.lrange(key, 0, -1),
        b"stream": redis.xrange,
        b"string": redis.get,
        b"none": lambda key: None,  # gone meanwhile
        b"zset": lambda key: redis.zrange(key, 0, -1),
    }
    found: dict[str, Any] = {}
    for key in sorted(await redis.keys()):
        name = key.decode()
        if not name.endswith(skip):
            content = read[await redis.type(key)](key)
            found[name] = await content if content is not None else None
    return found


def status(worker_id: str, **fields: Any) -> WorkerStatus:
    return WorkerStatus(**({"worker_id": worker_id, "host": "h", "pid": 1, "state": "serving", "version": 0} | fields))


async def replies(broker: Broker, client_id: str = "client") -> list[Reply]:
    """Everything on a client's reply stream."""
    found: list[Reply] = []
    for part in broker.parts:
        place = "0"
        while more := await part.read_replies(client_id, place, count=1000):
            found, place = found + more, more[-1].entry_id
    return found


async def wait_replies(broker: Broker, count: int, client_id: str = "client", timeout: float = 60.0) -> list[Reply]:
    """The reply stream once it has `count` entries; more would be a duplicate."""

    async def enough() -> bool:
        return await broker.count_replies(client_id) >= count

    await eventually(enough, timeout, f"{count} replies")
    found = await replies(broker, client_id)
    assert len(found) == count
    return found


async def letters(broker: Broker) -> list[DeadLetter]:
    """The pool's dead letters, whole, newest first."""
    boxes = [DeadLetters(part) for part in broker.parts]
    return [await found.get(head.entry_id) for found in boxes for head in await found.page()]


async def looked(running: Running) -> None:
    """Wait until the worker has looked for a version: it learns of the next one while it serves."""
    await eventually(lambda: "weights" in running.worker.vitals.startup.seconds)


async def stream_length(db: Redis, broker: Broker) -> int:
    """Entries on the reply stream of the client named "client": what it has not acknowledged."""
    return await broker.count_replies("client")


def check_scripted(result: RolloutResult, prompt_len: int) -> None:
    """Every token is the one that its position, the version of its segment and that of its adapter's demand, and so is
    its logprob."""
    stream = f"{result.job_id}{result.sample:04x}"
    versions = [version for version, count in result.segments for _ in range(count)]
    adapters = [f"{result.adapter}@{version}" for version, count in result.adapter_segments or () for _ in range(count)]
    sampled = zip(versions, adapters or [""] * len(versions), strict=True)
    expected = [scripted_token(stream, prompt_len + i, *by) for i, by in enumerate(sampled)]
    assert result.token_ids.tolist() == expected
    if result.logprobs is not None:
        assert np.allclose(result.logprobs, [scripted_logprob(token) for token in expected])


def short_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections opened from now on give up on a Redis that is gone after 0.2 seconds."""
    original = BoundedRetry.__init__

    def init(self: BoundedRetry, budget_s: float = 0.2, *more: Any) -> None:
        original(self, min(budget_s, 0.2), *more)

    monkeypatch.setattr(BoundedRetry, "__init__", init)


def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses that are made between two attempts from now on, in seconds."""
    made: list[float] = []
    sleep = asyncio.sleep

    async def paused(seconds: float) -> None:
        made.append(seconds)
        await sleep(seconds)

    monkeypatch.setattr("rolloutmq.messages.redis.retry.asyncio.sleep", paused)
    return made


class Running:
    """A worker on this event loop. `stop` drains it; `crash` is what a SIGKILL looks like from outside.

    `die` is a crash whose lease is over, too: nobody waits for that, and a test needs no short lease, which a busy
    machine would let run out.
    """

    def __init__(self, worker: Worker, engine: ScriptedEngine) -> None:
        self.worker, self.engine = worker, engine
        self.task = asyncio.create_task(worker.run())

    @property
    def id(self) -> str:
        return self.worker.worker_id

    @property
    def generation(self) -> Generation:
        """What runs on it, as its metrics read it."""
        return self.worker.vitals.generation

    @property
    def status(self) -> WorkerStatus:
        """What its next heartbeat says."""
        return self.worker._status()

    @property
    def sampled(self) -> list[int]:
        """How many tokens each request in the engine has by now."""
        found = map(self.engine.progress, self.generation.in_flight.running)
        return [len(progress.token_ids) for progress in found if progress is not None]

    async def stop(self) -> None:
        self.worker.drain()
        await asyncio.wait_for(self.task, 20)

    async def crash(self) -> None:
        """No word to anybody: whatever it would still send to Redis is never sent."""
        self.task.cancel()
        await asyncio.wait({self.task})  # whoever calls may be cancelled meanwhile
        if not self.task.cancelled():
            self.task.result()

    async def die(self) -> None:
        """Crash; the next heartbeat of another worker takes its jobs back."""
        await self.crash()
        config = self.worker.config
        async with connect(config.redis_url, pool=config.pool) as db:
            for shard, its in enumerate(db.shards or (db,)):
                await its.zadd(Keys(config.pool, shard).workers, {self.id: 1}, xx=True)


@asynccontextmanager
async def worker(
    url: str, *, engine: ScriptedEngine | None = None, tokenizer: Tokenizer | None = None, **config: Any
) -> AsyncIterator[Running]:
    """A real Worker with a ScriptedEngine. Joined when the block is entered, drained when it is left."""
    engine = engine or ScriptedEngine()
    settings = WorkerConfig(**({"redis_url": url, "drain_s": 5.0} | config))
    running = Running(Worker(settings, engine, tokenizer or NoTokenizer()), engine)
    try:
        await eventually(lambda: running.worker.joined.is_set() or running.task.done(), what="the worker's start")
        if running.task.done():
            running.task.result()
        yield running
    finally:
        if not running.task.done():
            await running.stop()
