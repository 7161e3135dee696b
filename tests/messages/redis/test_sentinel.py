"""Redis behind sentinels: a pool goes on when its primary is lost and a replica takes its place."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from support.pools.pool import check_scripted, pauses, short_retries, worker
from support.redis.deployments import FAST_SYNC, follow, plain, replicated, sentinel, soon
from support.specimens.messages import tokens

from rolloutmq import RolloutClient
from rolloutmq.messages import RolloutResult
from rolloutmq.messages.errors import ConfigError, RedisUnavailable
from rolloutmq.messages.redis.connection import connect, ping
from rolloutmq.ops.redis.embedded import EmbeddedRedis
from rolloutmq.worker.scripted.engine import ScriptedEngine

Pair = tuple[EmbeddedRedis, EmbeddedRedis]


@pytest.fixture
def pair() -> Iterator[Pair]:
    with replicated() as (primary, replica):
        yield primary, replica


async def test_the_primary_is_found_though_the_first_sentinel_is_gone(pair: Pair) -> None:
    with sentinel(pair[0]) as port:
        async with connect(f"redis+sentinel://127.0.0.1:1,127.0.0.1:{port}/main/2") as client:
            await ping(client)
            await client.set("k", "v")
        async with connect(pair[0].url.replace("/0", "/2")) as direct:
            assert await direct.get("k") == b"v"


async def test_sentinels_and_servers_have_passwords_of_their_own(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    short_retries(monkeypatch)
    for server in pair:
        with plain(server) as admin:
            admin.config_set("masterauth", "data")
            admin.config_set("requirepass", "data")
    more = "sentinel auth-pass main data\nrequirepass watch\n"
    with sentinel(pair[0], more=more) as port:
        async with connect(f"redis+sentinel://:data@127.0.0.1:{port}/main?sentinel_password=watch") as client:
            await ping(client)
        async with connect(f"redis+sentinel://:data@127.0.0.1:{port}/main?sentinel_password=wrong") as client:
            with pytest.raises(RedisUnavailable, match=r"no sentinel names a primary of 'main': 127\.0\.0\.1"):
                await ping(client)
        async with connect(f"redis+sentinel://:wrong@127.0.0.1:{port}/main?sentinel_password=watch") as client:
            made = pauses(monkeypatch)
            with pytest.raises(RedisUnavailable, match="refused these credentials"):
                await ping(client)
            assert made == []


@pytest.mark.parametrize(
    "answer", [b"+OK\r\n", b"*1\r\n*2\r\n$4\r\nname\r\n$4\r\nmain\r\n", b"HTTP/1.1 400 Bad Request\r\n\r\n"]
)
@pytest.mark.parametrize("url", ["redis+sentinel://127.0.0.1:{}/main", "redis+cluster://127.0.0.1:{}"])
async def test_a_server_that_answers_something_else_is_named(
    url: str, answer: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    short_retries(monkeypatch)

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(4096):
            writer.write(answer)
        writer.close()

    async with await asyncio.start_server(talk, "127.0.0.1") as server:
        port = server.sockets[0].getsockname()[1]
        async with connect(url.format(port), pool="p") as client:
            with pytest.raises(RedisUnavailable, match=f"127.0.0.1:{port}: "):
                await ping(client, once=True)


async def test_an_unknown_service_is_told_with_the_sentinels(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    short_retries(monkeypatch)
    with sentinel(pair[0]) as port:
        async with connect(f"redis+sentinel://127.0.0.1:{port}/other") as client:
            with pytest.raises(RedisUnavailable, match=rf"primary of 'other', as sentinels 127.0.0.1:{port} know it"):
                await ping(client)


async def test_a_primary_that_became_a_replica_is_not_read_from(pair: Pair) -> None:
    """A sentinel that has not noticed still names it; a reader would read old results there for ever."""
    with sentinel(pair[0], more="sentinel down-after-milliseconds main 60000\n") as port:
        with plain(pair[0]) as demoted, plain(pair[1]) as promoted:
            promoted.replicaof("NO", "ONE")
            demoted.replicaof("127.0.0.1", pair[1].port)
        async with connect(f"redis+sentinel://127.0.0.1:{port}/main", blocking=True) as reader:
            with pytest.raises(RedisUnavailable, match=r"is no primary any more \(slave\)"):
                await reader.xread({"s": "0"}, block=10)


async def test_a_pool_outlives_the_death_of_its_primary(pair: Pair) -> None:
    primary, replica = pair
    jobs = [tokens(n=2) for _ in range(60)]
    with sentinel(primary) as port:
        url = f"redis+sentinel://127.0.0.1:1,127.0.0.1:{port}/main?min_replicas=1&replica_timeout_ms=500"
        before = asyncio.Event()
        async with (
            worker(url, engine=ScriptedEngine(tokens_per_s=10), max_running=8, lease_s=5),
            RolloutClient(url) as it,
        ):
            await it.submit_many(jobs)

            async def take() -> list[RolloutResult]:
                found: list[RolloutResult] = []
                async for outcome in it.results(60):
                    assert isinstance(outcome, RolloutResult)
                    found.append(outcome)
                    if len(found) == 20:
                        before.set()
                return found

            taking = asyncio.create_task(take())
            await before.wait()
            primary.kill()
            await asyncio.to_thread(soon, lambda: plain(replica).execute_command("ROLE")[0] == b"master")
            assert not taking.done()  # one server is left, and what counts has to be on two
            with EmbeddedRedis(config=FAST_SYNC) as replacement:
                await asyncio.to_thread(follow, replacement, replica)
                results = await asyncio.wait_for(taking, 60)
        assert {(one.job_id, one.sample) for one in results} == {(job.id, sample) for job in jobs for sample in (0, 1)}
        assert len(results) == 120
        for one in results:
            check_scripted(one, 3)


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("redis+sentinel:///main", "hosts are missing"),
        ("redis+sentinel://h:1", "name under which the sentinels know"),
        ("redis+sentinel://h:1,/main", "each host must be"),
        ("redis+sentinel://h:port/main", "each host must be"),
        ("redis+sentinel://h:1/main/0/0", "only the service"),
        ("redis+sentinel://h/main?sentinel_pasword=hunter2", "unknown option sentinel_pasword"),
        ("redis+sentinel://u:hunter2@h:99999/main", "up to 65535"),
        ("redis+sentinels://h/main", "scheme must be one of"),
        ("redis://h?sentinel_password=hunter2", "unknown option sentinel_password"),
    ],
)
def test_a_malformed_url_is_a_config_error(url: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as caught:
        connect(url)
    assert "hunter2" not in str(caught.value)
