"""A pool on the shared server: its broker, leases as workers would hold them, a client and a worker that serves it.

And the one pool of a real worker process that test modules share.
"""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from support.pools.pool import eventually, status, worker
from support.pools.worker_process import WorkerProcess

from rolloutmq import RolloutClient
from rolloutmq.messages import Broker, Lease, connect
from rolloutmq.messages.broker import ShardedLease, broker_of
from rolloutmq.messages.redis import ping
from rolloutmq.ops.redis.embedded import EmbeddedRedis
from rolloutmq.producer.control import PoolControl
from rolloutmq.sync.transfer.ledger import Ledger
from rolloutmq.worker.sglang.features import FILES

MakeLease = Callable[..., Awaitable[Lease]]
SMALL_RUNNING, SMALL_TOKENS = 12, 2000
"""What the engine of `small_worker` decodes at once, and its KV cache, which holds less than these may want."""


@pytest.fixture
async def db(redis_db: str) -> AsyncIterator[Redis]:
    async with connect(redis_db, pool="default") as client:
        if client.shards:
            await ping(client)  # they know that they are shards before a test looks at one of them
        yield client


@pytest.fixture
def broker(db: Redis) -> Broker:
    return broker_of(db, "default")


@pytest.fixture
def ledger(db: Redis) -> Ledger:
    return Ledger(db, "default")


@pytest.fixture
def joined(db: Redis) -> MakeLease:
    """Makes a lease that has joined."""

    async def make(worker_id: str = "w1", lease_s: float = 10.0, **fields: Any) -> Lease:
        clients = getattr(db, "shards", ()) or (db,)
        parts = [
            Lease(its, "default", worker_id, lease_s, shard=shard, shards=len(clients))
            for shard, its in enumerate(clients)
        ]
        for part in parts:
            await part.join(status(worker_id, **fields))
        return parts[0] if len(parts) == 1 else ShardedLease(parts)

    return make


@pytest.fixture
def expire_lease(db: Redis, broker: Broker) -> Callable[[Lease], Awaitable[None]]:
    """Makes a lease end now, as if its worker had been silent for that long."""

    async def expire(lease: Lease) -> None:
        for part in broker.parts:
            assert await part.redis.zadd(part.keys.workers, {lease.worker_id: 1}, xx=True, ch=True)

    return expire


@pytest.fixture
async def client(redis_db: str) -> AsyncIterator[RolloutClient]:
    async with RolloutClient(redis_db, client_id="client") as opened:
        yield opened


@pytest.fixture
async def serving(redis_db: str) -> AsyncIterator[None]:
    async with worker(redis_db, max_running=32):
        yield


@pytest.fixture
def serving_thread(redis_db: str) -> Iterator[None]:
    """A worker on an event loop in a thread, for code that has none."""
    started, stop = threading.Event(), threading.Event()

    async def serve() -> None:
        async with worker(redis_db, max_running=32):
            started.set()
            await eventually(stop.is_set, 60)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert started.wait(10)
    yield
    stop.set()
    thread.join(20)
    assert not thread.is_alive()


@pytest.fixture
async def control(redis_db: str) -> AsyncIterator[PoolControl]:
    async with PoolControl(redis_db) as opened:
        yield opened


@pytest.fixture(scope="session")
def small_pool() -> Iterator[str]:
    """URL of the server of `small_worker`."""
    with EmbeddedRedis() as server:
        yield server.url


@pytest.fixture(scope="session")
def small_worker(
    text_model: Path, small_pool: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[WorkerProcess]:
    """A process with the model of `text_engine`, but without its tokenizer, and with a small KV cache.

    `test_engine_ops` comes last, and uses it up.
    """
    folder = tmp_path_factory.mktemp("small")
    shutil.copytree(text_model, folder / "model", ignore=lambda *_: FILES)
    options = ("--dtype", "float32", "--max-running", str(SMALL_RUNNING), "--max-total-tokens", str(SMALL_TOKENS))
    # It admits requests as if they ended early, and warns when they do not and it retracts some.
    options += ("--sglang", "schedule_conservativeness=0.05", "--sglang", 'log_level="warning"')
    started = WorkerProcess(folder / "model", small_pool, folder / "worker.log", "--drain", "5", *options)
    try:
        started.wait_joined()
        yield started
    finally:
        started.kill()
