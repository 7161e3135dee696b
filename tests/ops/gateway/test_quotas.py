"""Rates and budgets hold over all gateways, on a real server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from redis.asyncio import Redis
from support.pools.pool import eventually, short_retries

from rolloutmq.messages.redis import Keys, connect
from rolloutmq.ops.gateway import quotas
from rolloutmq.ops.gateway.quotas import Admission, Quotas
from rolloutmq.ops.gateway.tenants import Tenant
from rolloutmq.ops.http import Refused
from rolloutmq.ops.redis.embedded import EmbeddedRedis

KEYS = Keys("mine")
DAY_MS = 86_400_000


@pytest.fixture
async def redis(redis_db: str, shared_redis: EmbeddedRedis) -> AsyncIterator[Redis]:
    async with connect(shared_redis.url) as client:
        yield client


@pytest.fixture
def gateways(redis: Redis) -> list[Quotas]:
    return [Quotas(redis, "mine"), Quotas(redis, "mine")]


async def refused(quotas: Quotas, tenant: Tenant, tokens: int = 1) -> Refused:
    with pytest.raises(Refused) as caught:
        await quotas.admit(tenant, tokens)
    return caught.value


async def owed(redis: Redis, field: str, tenant: str = "default") -> float:
    return float(await redis.hget(KEYS.spent(tenant), field) or 0)


async def later(redis: Redis, seconds: float, tenant: str = "default") -> None:
    """As if what the tenant did had been done so much earlier."""
    at = int(await redis.hget(KEYS.spent(tenant), "at") or 0)
    await redis.hset(KEYS.spent(tenant), "at", at - int(seconds * 1000))


async def end(quotas: Quotas, *admissions: Admission, used: int | None = 0) -> None:
    for one in admissions:
        one.settle(used)
    await quotas.settle()


async def test_who_has_no_limits_costs_redis_nothing(redis: Redis, gateways: list[Quotas]) -> None:
    before = (await redis.info("commandstats")).get("cmdstat_evalsha", {}).get("calls", 0)
    (await gateways[0].admit(Tenant(), 10**15)).settle(5)
    await gateways[0].settle(renew=True)
    assert (await redis.info("commandstats")).get("cmdstat_evalsha", {}).get("calls", 0) == before
    assert await redis.keys() == []


async def test_requests_per_minute_over_two_gateways(redis: Redis, gateways: list[Quotas]) -> None:
    tenant = Tenant(requests_per_minute=60)
    admitted = [await gateways[number % 2].admit(tenant, 5) for number in range(60)]
    assert all(one.request for one in admitted)
    for one in gateways:
        error = await refused(one, tenant)
        assert (error.status, error.code, error.kind) == (429, "rate_limit_exceeded", "rate_limit_error")
        assert error.headers["retry-after"] == "1"
    await later(redis, 10)
    for _ in range(10):
        await gateways[0].admit(tenant, 5)
    await refused(gateways[1], tenant)
    assert (await gateways[0].admit(Tenant(name="other", requests_per_minute=60), 5)).request


async def test_tokens_per_minute_are_charged_before_and_what_was_not_used_comes_back(
    redis: Redis, gateways: list[Quotas]
) -> None:
    tenant = Tenant(tokens_per_minute=1000)
    first = await gateways[0].admit(tenant, 900)
    error = await refused(gateways[1], tenant, 200)
    assert 5 <= int(error.headers["retry-after"]) <= 6  # 100 tokens too many
    await end(gateways[0], first, used=100)
    second = await gateways[1].admit(tenant, 800)
    await end(gateways[0], first, used=0)  # a second time changes nothing
    await end(gateways[0], second, used=0)  # nor by another gateway, which does not know of it
    assert await owed(redis, "tokens") > 800
    await end(gateways[1], second)
    assert await owed(redis, "tokens") <= 100


async def test_a_request_larger_than_a_minute_goes_alone_and_is_paid_for(redis: Redis, gateways: list[Quotas]) -> None:
    tenant = Tenant(tokens_per_minute=1000)
    large = await gateways[0].admit(tenant, 5000)
    await end(gateways[0], large, used=5000)
    assert int((await refused(gateways[1], tenant, 1)).headers["retry-after"]) in (240, 241)
    await later(redis, -3600)  # Redis' clock is set back by an hour
    await refused(gateways[1], tenant)
    await later(redis, 241)
    await gateways[1].admit(tenant, 1)
    assert (await refused(gateways[0], tenant, 5000)).code == "rate_limit_exceeded"


async def test_a_days_budget_is_never_overshot(redis: Redis, gateways: list[Quotas]) -> None:
    """Many at once, from two gateways, each of which could use all that it asks for."""
    tenant = Tenant(tokens_per_day=10_000)
    asked = [gateways[number % 2].admit(tenant, 300) for number in range(100)]
    outcomes: list[Any] = await asyncio.gather(*asked, return_exceptions=True)
    admitted = [one for one in outcomes if isinstance(one, Admission)]
    assert len(admitted) == 33
    (error, *_) = [one for one in outcomes if isinstance(one, Refused)]
    assert (error.status, error.code, error.kind) == (429, "insufficient_quota", "insufficient_quota")
    assert 0 < int(error.headers["retry-after"]) <= DAY_MS / 1000
    for one in admitted:
        one.settle(100)
    await asyncio.gather(*(one.settle() for one in gateways))
    assert await owed(redis, "used") == 3300
    await gateways[0].admit(tenant, 6700)
    await refused(gateways[0], tenant, 1)
    await redis.hincrby(KEYS.spent("default"), "day", -1)
    assert (await gateways[1].admit(tenant, 10_000)).request


async def test_what_was_charged_yesterday_does_not_come_back_today(redis: Redis, gateways: list[Quotas]) -> None:
    tenant = Tenant(tokens_per_day=1000)
    old = await gateways[0].admit(tenant, 900)
    await redis.hincrby(KEYS.spent("default"), "day", -1)
    old.day -= 1
    await gateways[0].admit(tenant, 1000)
    await end(gateways[0], old)
    await refused(gateways[0], tenant, 1)


async def test_an_answer_whose_tokens_nobody_knows_stays_charged(redis: Redis, gateways: list[Quotas]) -> None:
    tenant = Tenant(tokens_per_day=1000, max_running=1)
    await end(gateways[0], await gateways[0].admit(tenant, 600), used=None)
    await refused(gateways[0], tenant, 600)
    await gateways[0].admit(tenant, 400)


async def test_requests_at_a_time_and_those_of_a_dead_gateway(
    redis: Redis, gateways: list[Quotas], monkeypatch: pytest.MonkeyPatch
) -> None:
    tenant = Tenant(max_running=2)
    dead, mine = gateways
    await dead.admit(tenant, 5)
    running = await mine.admit(tenant, 5)
    assert (await refused(mine, tenant)).code == "rate_limit_exceeded"
    for key in ("admitted", "spent"):
        assert 0 < await redis.ttl(getattr(KEYS, key)("default")) <= 172_800
    for name, score in await redis.zrange(KEYS.admitted("default"), 0, -1, withscores=True):
        await redis.zadd(KEYS.admitted("default"), {name: score - 59_000})  # a minute later, nearly
    await mine.settle(renew=True)
    for name, score in await redis.zrange(KEYS.admitted("default"), 0, -1, withscores=True):
        await redis.zadd(KEYS.admitted("default"), {name: score - 2_000})
    second = await mine.admit(tenant, 5)  # the dead one's place
    await refused(mine, tenant)
    await end(mine, running, second)
    assert await redis.zcard(KEYS.admitted("default")) == 0


async def test_what_ends_is_told_by_itself_and_at_the_end(
    redis: Redis, gateways: list[Quotas], monkeypatch: pytest.MonkeyPatch
) -> None:
    tenant = Tenant(max_running=1, tokens_per_day=1000)
    async with gateways[0].run():
        (await gateways[0].admit(tenant, 5)).settle(1)
        await eventually(lambda: _used(redis, 1))
        last = await eventually(lambda: _admitted(gateways[0], tenant))
        last.settle(1)
    assert await owed(redis, "used") == 2


async def _used(redis: Redis, tokens: int) -> bool:
    return await owed(redis, "used") == tokens


async def _admitted(quotas: Quotas, tenant: Tenant) -> Admission | None:
    try:
        return await quotas.admit(tenant, 5)
    except Refused:
        return None


@pytest.mark.parametrize("junk", ["x", "-5", "1e400", "nan", "9" * 30, ""])
async def test_junk_in_redis_shuts_nobody_out(redis: Redis, gateways: list[Quotas], junk: str) -> None:
    tenant = Tenant(requests_per_minute=5, tokens_per_minute=5, tokens_per_day=5, max_running=5)
    fields = ("at", "requests", "tokens", "day", "used")
    await redis.hset(KEYS.spent("default"), mapping=dict.fromkeys(fields, junk))
    await redis.set(KEYS.admitted("default"), junk)
    admission = await gateways[0].admit(tenant, 5)
    await end(gateways[0], admission)
    assert await owed(redis, "used") == 0


async def test_without_redis_nobody_gets_in(redis_server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch) -> None:
    short_retries(monkeypatch)
    tenant = Tenant(tokens_per_day=1000, max_running=1)
    async with connect(redis_server.url) as client:
        one = Quotas(client, "mine")
        admission = await one.admit(tenant, 5)
        redis_server.kill()
        error = await refused(one, tenant)
        assert (error.status, error.code, error.headers["retry-after"]) == (503, "service_unavailable", "5")
        assert (await one.admit(Tenant(), 5)).request == ""
        monkeypatch.setattr(quotas, "SETTLE_S", 0.01)
        async with one.run():
            admission.settle(1)
            redis_server.start()
            await eventually(lambda: _admitted(one, tenant))
