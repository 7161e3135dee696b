from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator

import pytest
import redis.exceptions
from redis.asyncio.connection import SSLConnection
from support.pools.pool import pauses, short_retries

from rolloutmq.messages import Broker
from rolloutmq.messages.errors import ConfigError, InvalidField, RedisUnavailable
from rolloutmq.messages.redis import RETRY_BUDGET_S, connection
from rolloutmq.messages.redis.connection import connect, ping, redacted
from rolloutmq.messages.redis.retry import REPLY_TIMEOUT_S, BoundedRetry
from rolloutmq.ops.redis.embedded import EmbeddedRedis


@pytest.fixture
async def client(redis_server: EmbeddedRedis) -> AsyncIterator[redis.asyncio.Redis]:
    async with connect(redis_server.url) as connected:
        yield connected


async def test_bytes_over_tcp_and_unix_socket(redis_server: EmbeddedRedis) -> None:
    for url in (redis_server.url, redis_server.unix_url):
        async with connect(url) as client:
            await ping(client)
            await client.set("k", b"\xff\x00")
            assert await client.get("k") == b"\xff\x00"
            entry = await client.xadd("s", {"f": "v"})
            assert await client.xread({"s": "0"}) == [[b"s", [(entry, {b"f": b"v"})]]]
            await client.delete("s")


async def test_database_and_credentials_come_from_the_url(
    redis_server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connect(redis_server.url) as admin:
        await admin.execute_command("ACL", "SETUSER", "eve", "on", ">p@ss/word", "~*", "+@all")
        base = f"redis://eve:p%40ss%2Fword@127.0.0.1:{redis_server.port}"
        async with connect(base + "/3") as client:
            await client.set("k", "v")
        async with connect(redis_server.url.replace("/0", "/3")) as client:
            assert await client.get("k") == b"v"
        async with connect(base.replace("p%40ss", "wrong")) as client:
            made = pauses(monkeypatch)
            with pytest.raises(RedisUnavailable, match="refused these credentials"):
                await ping(client)
            assert made == [], "refused is refused: nothing is tried again"


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("", "scheme"),
        ("localhost:6379", "scheme"),
        ("http://localhost:6379", "scheme"),
        ("redis://", "host is missing"),
        ("redis://:6379", "host is missing"),
        ("redis://h:port/0", "port must be a number"),
        ("redis://h:99999/0", "port must be a number"),
        ("redis://h:6379/zero", "database's number"),
        ("redis://h?db=x", "db"),
        ("redis://h?decode_responses=1", "unknown option decode_responses"),
        ("redis://h?protocol=3", "unknown option protocol"),
        ("unix://", "path of the socket"),
        ("redis://[h", "IPv6 address needs"),
        ("redis://h:0/0", "port must be a number from 1"),
        (f"redis://h/{'9' * 5000}", "database's number"),
        ("redis://h?db=-1", "db must be a number from 0"),
        ("redis://h?max_connections=-4", "max_connections must be a number from 1"),
        (f"redis://h?min_replicas={'9' * 5000}", "min_replicas must be a number from 0"),
        ("redis://h?ssl_bogus=1", "unknown option ssl_bogus"),
        ("redis://h?ssl_cert_reqs=none", "unknown option ssl_cert_reqs; .*rediss://"),
        ("rediss://h?ssl_bogus=1", "unknown option ssl_bogus; allowed are .*ssl_ca_certs"),
        ("rediss://h?ssl_cert_reqs=often", "ssl_cert_reqs: .*often"),
        ("rediss://h?ssl_ciphers=none", "ssl_ciphers: "),
        ("rediss://h?ssl_ca_data=none", "ssl_ca_data: "),
        ("rediss+cluster://h?ssl_bogus=1", "unknown option ssl_bogus"),
        ("redis+sentinel://[h/main", "IPv6 address needs"),
        (f"redis+sentinel://h/main/{'9' * 5000}", "after the hosts"),
        ("redis+cluster://[::1", "IPv6 address needs"),
        (None, "must be a string"),
    ],
)
def test_a_malformed_url_is_a_config_error(url: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        connect(url)


@pytest.mark.parametrize(
    "url",
    [
        "redis://u:hunter2@h:port/0",
        "redis://:hunter2@h/zero",
        "redis://u:12/hunter2@h",
        "redis://u:hunter2#@h/0?x=1",
        "unix:///s?password=hunter2&y=1",
        "http://u:hunter2@h",
        "redis+sentinel://u:hunter2@h\u2100/main",
    ],
)
def test_no_error_shows_the_password(url: str) -> None:
    assert "hunter2" not in redacted(url)
    with pytest.raises(ConfigError) as caught:
        connect(url)
    assert "hunter2" not in str(caught.value)


def test_tls_urls_get_tls() -> None:
    pool = connect("rediss://h:6380/0?ssl_cert_reqs=none").connection_pool
    assert issubclass(pool.connection_class, SSLConnection)


async def test_nobody_there_is_told_with_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    short_retries(monkeypatch)
    async with connect("redis://127.0.0.1:1/0") as client:
        with pytest.raises(RedisUnavailable, match=r"no Redis at 127\.0\.0\.1:1.*rolloutmq redis"):
            await ping(client)


async def test_a_command_outlives_a_restart_of_the_server(
    redis_server: EmbeddedRedis, client: redis.asyncio.Redis
) -> None:
    await client.set("k", "v")
    redis_server.kill()
    asked = asyncio.create_task(client.set("k", "again"))
    await asyncio.to_thread(redis_server.start)
    assert await asked is True


async def test_a_dead_server_is_noticed_within_the_budget(redis_server: EmbeddedRedis) -> None:
    async with connect(redis_server.url) as client:
        await client.set("k", "v")
        redis_server.kill()
        started = time.monotonic()
        with pytest.raises(redis.exceptions.ConnectionError):
            await client.get("k")
        assert time.monotonic() - started > RETRY_BUDGET_S * 0.8


async def test_a_frozen_server_is_noticed(redis_server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch) -> None:
    assert BoundedRetry.__init__.__defaults__ == (RETRY_BUDGET_S, REPLY_TIMEOUT_S) == (5.0, 5.0)
    monkeypatch.setattr(BoundedRetry.__init__, "__defaults__", (0.2, 1.0))
    async with connect(redis_server.url) as client:
        await client.set("k", "v")
        os.kill(redis_server.pid, signal.SIGSTOP)
        with pytest.raises(RedisUnavailable, match="no reply within 1 s"):
            await client.get("k")


async def test_more_callers_than_connections_wait_their_turn(
    client: redis.asyncio.Redis, redis_server: EmbeddedRedis
) -> None:
    await asyncio.gather(*(client.incr("n") for _ in range(500)))
    assert await client.get("n") == b"500"
    assert (await client.info("clients"))["connected_clients"] <= connection.MAX_CONNECTIONS + 1


async def test_a_blocking_read_waits_longer_than_a_reply_may_take(
    redis_server: EmbeddedRedis, client: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "REPLY_TIMEOUT_S", 1.0)
    async with connect(redis_server.url, blocking=True) as reader:
        assert await reader.xread({"s": "0"}, block=1100) == []


async def test_a_blocking_read_of_a_frozen_server_ends_soon_after_its_own_time(
    redis_server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host that dies says nothing; whoever reads with BLOCK 1000 must not wait for the longest BLOCK there is."""
    monkeypatch.setattr(connection, "REPLY_TIMEOUT_S", 0.3)
    async with connect(redis_server.url, blocking=True) as reader:
        await reader.xread({"s": "0"}, block=10)
        os.kill(redis_server.pid, signal.SIGSTOP)
        for read in (reader.xread({"s": "0"}, block=100), reader.blpop(["l"], timeout=0.1)):
            with pytest.raises(RedisUnavailable, match=r"no reply within 0\.4 s|Timeout connecting"):
                await read


async def test_a_blocking_read_is_not_sent_again(redis_server: EmbeddedRedis, client: redis.asyncio.Redis) -> None:
    async with connect(redis_server.url, blocking=True) as reader:
        reading = asyncio.create_task(reader.xread({"s": "0"}, block=20_000))
        async with asyncio.timeout(10):
            while (await client.info("clients"))["blocked_clients"] == 0:
                pass
            await client.client_kill_filter(_type="normal", skipme=True)
            with pytest.raises(redis.exceptions.ConnectionError):
                await reading
            # the next read opens a connection of its own accord
            await client.xadd("s", {"f": "v"})
            assert len(await reader.xread({"s": "0"}, block=1000)) == 1


async def test_text_that_cannot_be_sent_is_named(client: redis.asyncio.Redis) -> None:
    """Half a character, as a JSON text can have it."""
    broker, half = Broker(client, "p"), "\ud800"
    for act in (
        lambda: broker.cancel([half]),
        lambda: broker.stop([half]),
        lambda: broker.cancel_client("c", half),
        lambda: broker.open_jobs(half),
        lambda: broker.submitted([half]),
    ):
        with pytest.raises(InvalidField, match=r"ud800.*: characters that UTF-8 can encode"):
            await act()  # type: ignore[no-untyped-call]
    assert (await broker.load()).open_jobs == 0  # the connection is as good as before
