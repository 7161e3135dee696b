"""A pool on the shared server: its broker, leases as workers would hold them, a client and a worker that serves it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from redis.asyncio import Redis
from support.pools.pool import status, worker

from rolloutmq import RolloutClient
from rolloutmq.messages import Broker, Lease, connect
from rolloutmq.producer.control import PoolControl

MakeLease = Callable[..., Awaitable[Lease]]


@pytest.fixture
async def db(redis_db: str) -> AsyncIterator[Redis]:
    async with connect(redis_db) as client:
        yield client


@pytest.fixture
def broker(db: Redis) -> Broker:
    return Broker(db, "default")


@pytest.fixture
def joined(db: Redis) -> MakeLease:
    """Makes a lease that has joined."""

    async def make(worker_id: str = "w1", lease_s: float = 10.0, **fields: Any) -> Lease:
        lease = Lease(db, "default", worker_id, lease_s)
        await lease.join(status(worker_id, **fields))
        return lease

    return make


@pytest.fixture
def expire_lease(db: Redis, broker: Broker) -> Callable[[Lease], Awaitable[None]]:
    """Makes a lease end now, as if its worker had been silent for that long."""

    async def expire(lease: Lease) -> None:
        assert await db.zadd(broker.keys.workers, {lease.worker_id: 1}, xx=True, ch=True)

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
async def control(redis_db: str) -> AsyncIterator[PoolControl]:
    async with PoolControl(redis_db) as opened:
        yield opened
