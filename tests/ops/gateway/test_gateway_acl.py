"""A Redis user with exactly the rights that docs/redis.md gives a gateway."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from redis.asyncio import Redis
from redis.exceptions import NoPermissionError
from support.gateways import gateway
from support.pools.pool import dump, eventually, status, worker
from support.pools.small_gateway import SmallGateway
from support.redis.roles import create
from support.specimens.messages import tokens

from rolloutmq import RolloutClient
from rolloutmq.messages import Broker, Lease, connect
from rolloutmq.ops.gateway.quotas import Quotas
from rolloutmq.ops.gateway.tenants import Tenant
from rolloutmq.ops.http import Refused
from rolloutmq.ops.redis.embedded import EmbeddedRedis
from rolloutmq.sync.transfer.ledger import Ledger

READS = "+zcount +zrange %R~rmq:{mine}:*"
"""What docs/redis.md adds to the line of each gateway."""


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as started:
        yield started


@pytest.fixture
async def admin(server: EmbeddedRedis) -> AsyncIterator[Redis]:
    async with connect(server.url) as client:
        await client.flushall()
        await client.acl_log_reset()
        yield client


async def refusals(admin: Redis) -> list[str]:
    """What a user was refused. How much memory there is may be asked by an operator alone."""
    said = [str(entry["object"]) for entry in await admin.acl_log()]
    return [it for it in said if not it.startswith("client") and it != "info"]


async def test_a_gateway_does_its_work(server: EmbeddedRedis, admin: Redis) -> None:
    """It submits and reads like a producer, and counts what its tenants use."""
    tenant = Tenant(name="team", requests_per_minute=5, tokens_per_minute=500, tokens_per_day=500, max_running=1)
    async with (
        worker(create(server, "worker", "mine"), pool="mine"),
        RolloutClient(create(server, "gateway", "mine"), "mine", client_id="team/gw-1") as client,
    ):
        quotas = Quotas(client.broker.redis, "mine")
        async with quotas.run():
            admission = await quotas.admit(tenant, 400)
            with pytest.raises(Refused, match="1 requests of this tenant run already"):
                await quotas.admit(tenant, 50)
            assert len(await client.wait(await client.submit(tokens()), 10)) == 1
            await quotas.settle(renew=True)
            admission.settle(10)
        assert (await quotas.admit(tenant, 400)).request
    assert await refusals(admin) == []


async def test_a_whole_gateway_needs_no_more(server: EmbeddedRedis, admin: Redis) -> None:
    """Generation with and without a key, sessions, versions, facts, control of one's own requests."""
    asked = {"prompt": [1, 2, 3], "max_tokens": 4}
    async with (
        worker(create(server, "worker", "mine"), pool="mine"),
        gateway(create(server, "gateway", "mine", READS), pools=("mine",)) as client,
    ):

        async def ready() -> bool:
            return (await client.get("/health")).status_code == 200

        await eventually(ready)
        for body, headers in (
            (asked, {}),
            (asked, {"idempotency-key": "k"}),
            (asked | {"stream": True}, {"x-session-id": "s"}),
            (asked | {"enqueue": True}, {"idempotency-key": "later"}),
            (asked | {"weight_version": {"min_version": 0}}, {}),
        ):
            answer = await client.post("/v1/completions", json=body, headers=headers)
            assert answer.status_code in {200, 202}, answer.text
        assert (await client.get("/v1/requests/later", params={"wait": "30"})).status_code == 200
        for path in ("/v1/models", "/v1/loads", "/metrics", "/server_info", "/weight_info", "/get_weight_version"):
            assert (await client.get(path)).status_code == 200, path
        for path in ("/pause", "/resume", "/finish_session?session_id=s"):
            assert (await client.post(path)).status_code == 200, path
        assert (await client.post("/abort_request", json={"abort_all": True})).status_code == 200
        assert (
            await client.post("/generate", json={"input_ids": [1], "sampling_params": {"max_new_tokens": 2}})
        ).is_success
    assert await refusals(admin) == []


async def test_a_gateway_that_may_not_read_the_pool_says_so(server: EmbeddedRedis, admin: Redis) -> None:
    async with gateway(create(server, "gateway", "mine"), pools=("mine",)) as client:
        answer = await client.get("/health")
    assert (answer.status_code, answer.json()["reason"]) == (503, "the gateway's user may not read the pool in Redis")


async def test_one_gateway_inherits_from_another(server: EmbeddedRedis, admin: Redis) -> None:
    url = create(server, "gateway", "mine")
    async with (
        worker(create(server, "worker", "mine"), pool="mine"),
        SmallGateway(url, pool="mine") as first,
        SmallGateway(url, pool="mine") as second,
    ):
        answer = await first.ask("k")
        assert await second.ask("k") == answer
        await first.stop()
        await first.gateways.leave()

        async def one_is_left() -> bool:
            return bool(await admin.hlen(second.requests.keys.gateways) == 1)

        await eventually(one_is_left)
    assert await refusals(admin) == []


async def test_a_gateway_cannot_be_a_worker_and_a_producer_cannot_forgive_tokens(
    server: EmbeddedRedis, admin: Redis
) -> None:
    tenant = Tenant(tokens_per_day=500)
    await Quotas(admin, "mine").admit(tenant, 500)
    before = await dump(admin)
    async with (
        connect(create(server, "gateway", "mine")) as gateway,
        connect(create(server, "producer", "mine")) as producer,
    ):
        for attempt in (
            Lease(gateway, "mine", "w").join(status("w")), Lease(gateway, "mine", "w").claim(1, 1, 0),
            Ledger(gateway, "mine").new_epoch(), Broker(gateway, "mine").workers(),
            gateway.set("rmq:{mine}:weights", 1), gateway.hset("rmq:{other}:spent:default", "used", 0),
            producer.delete("rmq:{mine}:spent:default"), producer.hset("rmq:{mine}:spent:default", "used", 0),
        ):  # fmt: skip
            with pytest.raises(NoPermissionError):
                await attempt
    assert await dump(admin) == before
