"""Redis for tests is always a real server, started for them and gone after them; each test process has its own.

By default it is the Valkey of the wheel, the same on every machine; $ROLLOUTMQ_REDIS_SERVER names another one.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import redis
from support.redis.deployments import Certificates, NoTls

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
SHARDS = int(os.environ.get("ROLLOUTMQ_TEST_SHARDS", "1"))
"""With `make test-shards`: the tests' pools have so many shards, on two servers."""
embedded.PORTS = embedded.PORTS[int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % SHARES :: SHARES]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what is not about shards where pools have several."""
    if SHARDS > 1:
        items[:] = [item for item in items if item.get_closest_marker("one_shard") is None]


@pytest.fixture
def redis_server() -> Iterator[EmbeddedRedis]:
    """A server of the test's own, to kill, freeze or restart."""
    with EmbeddedRedis() as server:
        yield server


@pytest.fixture
def redis_url(redis_server: EmbeddedRedis, further_redis: list[EmbeddedRedis]) -> str:
    return pool_url(redis_server, further_redis)


@pytest.fixture(scope="session")
def shared_redis() -> Iterator[EmbeddedRedis]:
    """One server for the many tests that only read and write; use `redis_db`, which empties it first."""
    with EmbeddedRedis() as server:
        yield server


@pytest.fixture(scope="session")
def further_redis() -> Iterator[list[EmbeddedRedis]]:
    """Servers of the other shards, if these tests run on a pool with several, see SHARDS."""
    with ExitStack() as servers:
        yield [servers.enter_context(EmbeddedRedis()) for _ in range(min(SHARDS, 2) - 1)]


def pool_url(home: EmbeddedRedis, further: list[EmbeddedRedis]) -> str:
    """URL of a pool with as many shards as SHARDS says, on these servers; the further ones are emptied."""
    for server in further:
        with redis.Redis.from_url(server.url) as client:
            client.flushall()
            client.script_flush()
    return f"{','.join(server.url for server in [home, *further])}?shards={SHARDS}" if further else home.url


@pytest.fixture
def redis_db(shared_redis: EmbeddedRedis, further_redis: list[EmbeddedRedis]) -> str:
    """URL of the shared server, emptied: data and cached scripts."""
    with redis.Redis.from_url(shared_redis.url) as client:
        client.flushall()
        client.script_flush()
    return pool_url(shared_redis, further_redis)


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Of an authority of the tests' own."""
    try:
        return Certificates.make(tmp_path_factory.mktemp("certificates"))
    except NoTls as error:
        pytest.skip(str(error))
