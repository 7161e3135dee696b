"""A pool over several servers: what its URL says, and parties whose URLs say different things of one pool."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from redis.asyncio import Redis
from support.pools.pool import dump, eventually, worker
from typer.testing import CliRunner

from rolloutmq import RolloutClient, WeightPublisher
from rolloutmq.messages.errors import ConfigError, LayoutMismatch
from rolloutmq.messages.redis import Keys, connect, layout, parse_one, parse_shards, ping, redacted, shard_of
from rolloutmq.ops.cli import app
from rolloutmq.ops.metrics.exporter import Exporter
from rolloutmq.ops.redis.embedded import EmbeddedRedis

pytestmark = pytest.mark.one_shard


@pytest.fixture(scope="module")
def second() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as server:
        yield server


@pytest.fixture
async def pair(redis_db: str, second: EmbeddedRedis) -> tuple[str, str]:
    """URLs of two empty servers."""
    async with Redis.from_url(second.url) as client:
        await client.flushall()
    return redis_db, second.url


async def opened(url: str) -> str:
    """The id of the pool that this URL opens."""
    async with connect(url, pool="default") as client:
        await ping(client)
        return client.pool_id


def test_urls_of_several_servers() -> None:
    two = parse_shards("redis://:p,w@a:1/3,rediss://u:s@b:2/0?shards=4")
    assert two.count == 4
    assert [two.target(shard).nodes for shard in range(4)] == [(("a", 1),), (("b", 2),)] * 2
    assert (two.targets[0].tls, two.targets[1].tls) == (False, True)
    assert parse_shards("redis://a:1,redis://b:2").count == 2
    assert parse_shards("redis+sentinel://a,b/main/0,redis+sentinel://a,b/other/0").count == 2
    assert parse_shards("redis+cluster://a,b?shards=8").count == 8
    assert parse_shards("redis://a:1?shards=3").count == 3
    assert (parse_shards("redis://a:1").count, parse_shards("redis://a:1?shards=1").count) == (1, 1)
    assert "secret" not in redacted("redis://:secret@a:1,redis://u:secret@b:2?shards=4")
    assert "secret" not in redacted("redis://a/0,redis://u:secret@b/0,redis://:secret@c")
    assert "secret" not in redacted("unix:///run/a.sock, redis://:secret@b:2")


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("redis://a:1?shards=2,redis://b:2?shards=4", "shards= must be the same"),
        ("redis://a:1,redis://b:2,redis://c:3?shards=2", "at least 3"),
        ("redis://a:1?shards=65", "1 to 64"),
        ("redis+cluster://a:1,redis://b:2", "a cluster spreads shards by itself"),
        ("redis://a:1?durable=disk,redis://b:2", "must be the same for all servers"),
        ("redis://a:1,redis://a:1", "the same server twice"),
        ("redis://a:1/0,redis://u:p@a:1", "the same server twice"),
        ("redis://a:1,b:2?shards=2", "needs a complete URL"),
        ("redis://a,redis://b,", "needs a complete URL"),
    ],
)
def test_urls_that_cannot_be(url: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        parse_shards(url)


def test_what_works_with_one_redis_says_so() -> None:
    with pytest.raises(ConfigError, match="doctor works with one Redis, and this pool has 2 shards"):
        parse_one("redis://:secret@a:1?shards=2", "doctor")


def test_the_first_shard_has_the_names_of_a_pool_with_one() -> None:
    assert Keys("p", 0).prefix == Keys("p").prefix == "rmq:{p}:"
    assert Keys("p", 3).prefix == "rmq:{p:3}:"


def test_a_job_stays_in_its_shard_for_ever() -> None:
    """A release that placed jobs elsewhere would lose every job that was open before it."""
    assert [shard_of(f"{number:032x}", 4) for number in range(8)] == [0, 2, 0, 2, 1, 3, 1, 3]


async def test_parties_with_the_same_url_share_a_pool(pair: tuple[str, str]) -> None:
    a, b = pair
    first = await opened(f"{a},{b}?shards=4")
    assert len(first) == 16
    assert await opened(f"{a},{b}?shards=4") == first
    assert await opened(a.replace("/0", "/1")) == "", "another database, and so another pool"


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("{a}", "the URL names one shard, and its Redis has shard 0 of 2"),
        ("{a},{b}?shards=4", "the URL names 4 shards; .* has shard 0 of 2"),
        ("{b},{a}", "with shard 1 at .*; it is at .* in the order"),
        ("{a}?shards=2", "knows nothing of shard 1"),
        ("{b}", "the URL names one shard, and .* is not the first of these servers"),
        ("{b}?shards=2", "the URL names 2 shards; .* is not the first of these servers"),
    ],
)
async def test_another_layout_is_refused(pair: tuple[str, str], url: str, why: str) -> None:
    a, b = pair
    await opened(f"{a},{b}")
    with pytest.raises(LayoutMismatch, match=why) as refused:
        await opened(url.format(a=a, b=b))
    servers = "; ".join(":".join(map(str, parse_shards(one).targets[0].nodes[0])) for one in pair)
    assert f"pool default, which is on '{servers}'" in str(refused.value)


async def test_a_pool_of_an_earlier_release_learns_its_servers(pair: tuple[str, str]) -> None:
    a, b = pair
    await opened(f"{a},{b}")
    async with Redis.from_url(a) as home, Redis.from_url(b) as other:
        assert await other.delete(Keys("default").load) == 1  # an earlier release did not write it
        await home.hdel(Keys("default").load, "servers")
        assert await opened(b) == "", "nobody could know"
        await opened(f"{a},{b}")
        with pytest.raises(LayoutMismatch, match="not the first of these servers"):
            await opened(b)
        await other.hset(Keys("default").load, "servers", "old:1")  # the servers have moved since
        await opened(f"{a},{b}")
        with pytest.raises(LayoutMismatch, match=r"on '127\.0\.0\.1:"):
            await opened(b)


async def test_every_party_refuses_a_url_that_names_the_second_server_alone(
    pair: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    a, b = pair
    await opened(f"{a},{b}")
    async with Redis.from_url(b) as other:
        before = await dump(other)
        with pytest.raises(LayoutMismatch):
            async with RolloutClient(b) as client:
                await client.submit(token_ids=[1])
        with pytest.raises(LayoutMismatch):
            await asyncio.to_thread(WeightPublisher, b)
        with pytest.raises(LayoutMismatch):
            async with worker(b):
                pass
        for command in (["status"], ["ops", "run", "audit-broker"], ["ops", "list"]):
            told = await asyncio.to_thread(CliRunner().invoke, app, [*command, "--redis", b])
            assert told.exit_code == 2
            assert "is not the first of these servers" in told.stderr
        looks = asyncio.create_task(Exporter(b, "default", 0.02).run())
        await eventually(lambda: "is not the first of these servers" in caplog.text, what="the exporter's look")
        looks.cancel()
        await asyncio.gather(looks, return_exceptions=True)
        assert await dump(other) == before


async def test_a_second_server_in_use_as_one_shard_is_not_made_a_part(pair: tuple[str, str]) -> None:
    a, b = pair
    async with RolloutClient(b, client_id="client") as client:
        await client.submit(token_ids=[1])
        with pytest.raises(LayoutMismatch, match="has it as one shard, with 1 open jobs"):
            await opened(f"{a},{b}")


async def test_a_pool_in_use_is_not_spread(pair: tuple[str, str]) -> None:
    a, b = pair
    async with RolloutClient(a, client_id="client") as client:
        handle = await client.submit(token_ids=[1])
        with pytest.raises(LayoutMismatch, match="has it as one shard, with 1 open jobs"):
            await opened(f"{a},{b}")
        await client.cancel([handle])
        assert [one async for one in client.results(10)]
    await opened(f"{a},{b}")


async def test_who_dies_while_it_opens_a_pool_is_completed(pair: tuple[str, str]) -> None:
    a, b = pair
    async with Redis.from_url(a) as home:
        await home.hset(Keys("default").load, "layout", "0/2 0123456789abcdef ?")
        assert await opened(f"{a},{b}") == "0123456789abcdef"
        assert await home.hget(Keys("default").load, "layout") == b"0/2 0123456789abcdef"


@pytest.mark.parametrize("mine", [2, 4])
async def test_of_two_that_open_a_pool_at_once_with_different_shards_one_is_refused(
    pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch, mine: int
) -> None:
    """Both find nothing at first. The other one writes before this one does."""
    a, b = pair
    look = layout._check_unused

    async def too_late(*asked: Any) -> None:
        await look(*asked)
        monkeypatch.undo()
        await opened(f"{a},{b}?shards={6 - mine}")

    monkeypatch.setattr(layout, "_check_unused", too_late)
    with pytest.raises(LayoutMismatch, match=f"names {mine} shards; .* has shard 0 of {6 - mine}"):
        await opened(f"{a},{b}?shards={mine}")
    await opened(f"{a},{b}?shards={6 - mine}")


async def test_a_server_that_has_lost_its_data_is_not_taken_for_the_old_one(
    pair: tuple[str, str], second: EmbeddedRedis
) -> None:
    a, b = pair
    pool_id = await opened(f"{a},{b}")
    async with Redis.from_url(second.url) as lost:
        await lost.flushall()
        with pytest.raises(LayoutMismatch, match=r"knows nothing of shard 1.*HSET rmq:\{default:1\}:load layout"):
            await opened(f"{a},{b}")
        await lost.hset(Keys("default", 1).load, "layout", f"1/2 {pool_id}")  # as the error says
    assert await opened(f"{a},{b}") == pool_id
