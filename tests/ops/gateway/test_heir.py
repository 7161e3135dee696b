"""Gateways that die, or seem to: each request with a key gets one answer, and nothing is generated twice for it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from redis.asyncio import Redis
from support.pools.pool import eventually, worker
from support.pools.small_gateway import PROMPTS, SmallGateway
from support.specimens.messages import tokens

from rolloutmq import RolloutClient
from rolloutmq.messages import Broker, JobFailure
from rolloutmq.ops.gateway.answers import Answer
from rolloutmq.ops.gateway.requests import RequestLost
from rolloutmq.ops.operations.audit.sweep import Sweep
from rolloutmq.worker.scripted.engine import ScriptedEngine, scripted_token

Killable = Callable[..., Awaitable[Callable[[], Awaitable[None]]]]
LONG = {"max_new_tokens": 200}
TESTS = Path(__file__).parents[2]


@pytest.fixture
async def gateway(redis_db: str) -> AsyncIterator[SmallGateway]:
    async with SmallGateway(redis_db) as made:
        yield made


@pytest.fixture
async def killable(redis_db: str, db: Redis, broker: Broker) -> AsyncIterator[Killable]:
    """Starts a gateway as a process that stays at a stage. Returns, when it is there, what kills it."""
    started: list[asyncio.subprocess.Process] = []

    async def start(stage: str, key: str = "k") -> Callable[[], Awaitable[None]]:
        path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
        asked = [sys.executable, "-m", "support.pools.small_gateway", redis_db, stage, key]
        one = await asyncio.create_subprocess_exec(
            *asked, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": path}
        )
        started.append(one)
        assert one.stdout is not None
        name = (await one.stdout.readline()).decode().strip()
        assert name

        async def kill() -> None:
            one.kill()
            await one.wait()
            assert await db.delete(broker.keys.gateway(name))  # its life is over, and nobody has to wait for that

        return kill

    yield start
    for one in started:
        if one.returncode is None:
            one.kill()
        await one.communicate()


def check(answer: Answer, n: int = 1) -> None:
    """All samples of all jobs are there, each token the one that its job's id demands, with the prompts."""
    assert isinstance(answer, list)
    assert [len(results) for results in answer] == [n] * len(PROMPTS)
    for results, prompt in zip(answer, PROMPTS, strict=True):
        for sample, result in enumerate(results):
            stream = f"{result.job_id}{sample:04x}"
            expected = [scripted_token(stream, len(prompt) + i, 0) for i in range(len(result.token_ids))]
            assert (result.sample, result.token_ids.tolist()) == (sample, expected)
            assert result.prompt_ids.tolist() == prompt


async def nobody_is_left(db: Redis, broker: Broker, *names: str) -> None:
    """No gateway of the tenant but these is registered, and there are no outcomes of others."""
    wanted = {f"acme/{name}".encode() for name in names}

    async def gone() -> bool:
        return set(await db.hgetall(broker.keys.gateways)) == wanted

    await eventually(gone)
    assert {*await broker.unread()} <= {it.decode() for it in wanted}


@pytest.mark.parametrize("stage", ["begun", "submitted", "taken"])
async def test_a_killed_gateway_has_an_heir(
    db: Redis, broker: Broker, gateway: SmallGateway, killable: Killable, stage: str
) -> None:
    redis_db = gateway.url
    async with worker(redis_db) if stage == "taken" else contextlib.nullcontext():
        kill = await killable(stage)
        waits = [asyncio.create_task(gateway.ask("k", n=2, sampling={"max_new_tokens": 4})) for _ in range(3)]
        await eventually(lambda: gateway.cores)
        await kill()
        async with worker(redis_db):
            answers = await asyncio.wait_for(asyncio.gather(*waits), 60)
            for answer in answers:
                check(answer, n=2)
                assert answer == answers[0]
            assert await gateway.ask("k") == answers[0]
            await nobody_is_left(db, broker, gateway.gateways.name)
    load = await broker.load()
    assert (load.accepted, load.done, load.cancelled) == (2, 2, 0)
    assert len(gateway.recorded) == 1


async def test_one_of_two_heirs_inherits(
    redis_db: str, db: Redis, broker: Broker, gateway: SmallGateway, killable: Killable
) -> None:
    async with SmallGateway(redis_db) as other, worker(redis_db):
        for one in (gateway, other):
            await one.gateways.join("acme")
        keys = [f"k{number}" for number in range(4)]
        for kill in [await killable("taken", key) for key in keys]:
            await kill()
        for key in keys:
            first, second = await asyncio.gather(gateway.ask(key), other.ask(key))
            check(first, n=2)
            assert first == second
        await nobody_is_left(db, broker, gateway.gateways.name, other.gateways.name)
        assert len(gateway.recorded) + len(other.recorded) == len(keys)
    assert (await broker.load()).accepted == 2 * len(keys)


async def test_a_killed_heir_has_an_heir(redis_db: str, db: Redis, broker: Broker, killable: Killable) -> None:
    async with worker(redis_db):
        await (await killable("taken"))()
        await (await killable("inherits"))()  # it has the request's results, and has finished nothing
        async with SmallGateway(redis_db) as gateway:
            answer = await asyncio.wait_for(gateway.ask("k"), 60)
            check(answer, n=2)
            await nobody_is_left(db, broker, gateway.gateways.name)
    assert (await broker.load()).accepted == 2


async def test_an_heir_that_is_slow_has_an_heir(
    redis_db: str, db: Redis, broker: Broker, gateway: SmallGateway, killable: Killable
) -> None:
    """It may go on when it is back: what it does then changes nothing."""
    go_on, came = asyncio.Event(), asyncio.Event()

    async def slow(stage: str) -> None:
        if stage == "inherits":
            came.set()
            await go_on.wait()

    gateway.stage = slow
    async with worker(redis_db):
        await (await killable("taken"))()
        await asyncio.wait_for(came.wait(), 30)
        await gateway.stall()
        async with SmallGateway(redis_db) as other:
            answer = await asyncio.wait_for(other.ask("k"), 60)
            check(answer, n=2)
            name = gateway.gateways.name
            go_on.set()
            await eventually(lambda: len(gateway.recorded) == 1)
            gateway.wake()
            assert await gateway.ask("k") == answer
            await nobody_is_left(db, broker, gateway.gateways.name, other.gateways.name)
            assert gateway.gateways.name == name  # it had no clients of its own
    assert (await broker.load()).accepted == 2


async def test_a_gateway_that_was_only_slow_gets_the_answer_of_its_heir(
    redis_db: str, db: Redis, broker: Broker, gateway: SmallGateway
) -> None:
    engine = ScriptedEngine(tokens_per_s=100)
    async with SmallGateway(redis_db) as slow, worker(redis_db, engine=engine):
        asked = asyncio.create_task(slow.ask("k", sampling=LONG))
        await eventually(lambda: slow.open_jobs(2))
        await slow.stall()
        name = slow.gateways.name
        answer = await asyncio.wait_for(gateway.ask("k", sampling=LONG), 60)
        check(answer)
        assert await asyncio.wait_for(asked, 30) == answer
        slow.wake()
        await eventually(lambda: slow.gateways.name != name)
        assert await slow.ask("k", sampling=LONG) == answer
        check(await slow.ask("k2"))
        await nobody_is_left(db, broker, gateway.gateways.name, slow.gateways.name)
    load = await broker.load()
    assert (load.accepted, load.done, load.cancelled) == (4, 4, 0)
    assert (len(gateway.recorded), len(slow.recorded)) == (1, 1)


async def test_a_gateway_inherits_from_itself_under_a_new_name(
    redis_db: str, db: Redis, broker: Broker, gateway: SmallGateway
) -> None:
    """Nothing is cancelled when it closes the client of the old name."""
    async with worker(redis_db, engine=ScriptedEngine(tokens_per_s=100)):
        asked = asyncio.create_task(gateway.ask("k", sampling=LONG))
        await eventually(lambda: gateway.open_jobs(2))
        name = gateway.gateways.name
        await db.hset(broker.keys.gateways, f"acme/{name}", "-")
        check(await asyncio.wait_for(asked, 60))
        assert gateway.gateways.name != name
    load = await broker.load()
    assert (load.accepted, load.done, load.cancelled) == (2, 2, 0)


async def test_a_gateway_that_slept_before_it_submitted_answers_what_others_did(
    redis_db: str, db: Redis, broker: Broker, gateway: SmallGateway
) -> None:
    slept = asyncio.Event()

    async def sleeps(stage: str) -> None:
        if stage == "begun":
            await slept.wait()

    async with worker(redis_db), SmallGateway(redis_db, sleeps) as slow:
        asked = asyncio.create_task(slow.ask("k"))
        await eventually(lambda: slow.cores)
        await slow.stall()
        answer = await asyncio.wait_for(gateway.ask("k"), 60)
        check(answer)
        slept.set()
        assert await asyncio.wait_for(asked, 60) == answer
        slow.wake()
        await eventually(lambda: slow.closed)
        await slow.gateways.join("acme")
        await nobody_is_left(db, broker, gateway.gateways.name, slow.gateways.name)


async def test_a_gateway_lives_for_a_while_after_each_beat(db: Redis, gateway: SmallGateway) -> None:
    life = gateway.requests.keys.gateway(gateway.gateways.name)
    await eventually(lambda: db.exists(life))
    assert 3500 < await db.ttl(life) <= 3600
    await db.pexpire(life, 1)
    await eventually(lambda: db.exists(life))


async def test_what_nobody_can_ask_for_is_cancelled(
    redis_db: str, db: Redis, broker: Broker, gateway: SmallGateway
) -> None:
    """Jobs without a key; and a request of which a part was never accepted, which is new for whoever repeats it."""
    dead = "acme/gw-dead"
    await db.hset(broker.keys.gateways, dead, "")
    request = await gateway.requests.begin("acme", "cut", b"body", dead, prompts=PROMPTS)  # type: ignore[arg-type]
    async with RolloutClient(redis_db, client_id=dead) as client:
        await client.submit(tokens(id=request.job_ids[0], group_id=request.id, reply_to=dead))
        await client.submit(tokens(reply_to=dead, group_id="g"))
        await client.submit(tokens(reply_to=dead))
    with pytest.raises(RequestLost):
        await gateway.requests.wait(request, 60)
    await nobody_is_left(db, broker)
    load = await broker.load()
    assert (load.accepted, load.cancelled, load.open_jobs) == (3, 3, 0)
    owner = await gateway.gateways.join("acme")
    again = await gateway.requests.begin("acme", "cut", b"body", owner, prompts=PROMPTS)  # type: ignore[arg-type]
    assert (again.state, again.id) == ("new", request.id)
    assert not {*again.job_ids} & {*request.job_ids}


async def test_what_cannot_be_recorded_is_the_answer(db: Redis, broker: Broker, gateway: SmallGateway) -> None:
    dead = "acme/gw-dead"
    await db.hset(broker.keys.gateways, dead, "")
    request = await gateway.requests.begin("acme", "k", b"body", dead)
    gateway.refused.append(request.id)
    async with RolloutClient(gateway.url, client_id=dead) as client, worker(gateway.url):
        await client.submit(tokens(id=request.job_ids[0], group_id=request.id, reply_to=dead))
        answer = await gateway.requests.wait(request, 60)
    assert isinstance(answer, JobFailure)
    assert (answer.cause, gateway.recorded) == ("it was taken", [request.id])


async def test_what_a_gateway_leaves_is_taken_over_at_once(
    redis_db: str, db: Redis, broker: Broker, gateway: SmallGateway
) -> None:
    async with SmallGateway(redis_db) as first:
        asked = asyncio.create_task(first.ask("k"))
        await eventually(lambda: first.open_jobs(2))
        await first.stop()
        await first.gateways.leave()
        async with worker(redis_db):
            answer = await asyncio.wait_for(gateway.ask("k"), 60)
            assert await asyncio.wait_for(asked, 60) == answer
        check(answer)
        await nobody_is_left(db, broker, gateway.gateways.name)
    assert (await broker.load()).accepted == 2


async def test_the_audit_knows_what_is_there(redis_db: str, db: Redis, broker: Broker, gateway: SmallGateway) -> None:
    async with worker(redis_db):
        await gateway.ask("k")
    running = asyncio.create_task(gateway.ask("k2"))
    await eventually(lambda: gateway.open_jobs(2))
    await gateway.stop()  # or keys come and go while the audit looks
    kinds = {key.decode().partition("}:")[2].partition(":")[0] for key in await db.keys()}
    assert kinds >= {"request", "answered", "gateways", "gateway"}
    found = await Sweep(db, "default", lambda *_: None, 0.01, 100).run()
    assert (found["violations"], found["not_judged"]) == ([], [])
    gateway.wake()
    async with worker(redis_db):
        check(await running)


@pytest.mark.parametrize("junk", [b"\xff\xfe", b"", b"x", b"no name/\xff", b"a/b/c", b"9" * 400])
async def test_garbage_among_the_gateways_stops_none(
    redis_db: str, db: Redis, broker: Broker, gateway: SmallGateway, junk: bytes
) -> None:
    async with worker(redis_db):
        check(await gateway.ask("k"))
        await db.hset(broker.keys.gateways, mapping={junk: junk, b"t/gw-1": junk, junk + b"2": b""})
        async with SmallGateway(redis_db) as dead:
            asked = asyncio.create_task(dead.ask("k2"))
            check(await asked)
            await dead.stall()
            check(await gateway.ask("k3"))
            gone = f"acme/{dead.gateways.name}".encode()
            await eventually(lambda: _not_in(db, broker, gone, b"t/gw-1"))


async def _not_in(db: Redis, broker: Broker, *clients: bytes) -> bool:
    return not {*clients} & {*await db.hgetall(broker.keys.gateways)}


async def test_gateways_whose_register_is_something_else_join_again(
    redis_db: str, db: Redis, broker: Broker, gateway: SmallGateway
) -> None:
    async with worker(redis_db, engine=ScriptedEngine(tokens_per_s=100)), SmallGateway(redis_db) as other:
        asked = asyncio.create_task(gateway.ask("k", sampling=LONG))
        await eventually(lambda: gateway.open_jobs(2))
        waits = asyncio.create_task(other.ask("k", sampling=LONG))
        await eventually(lambda: other.cores)
        await db.delete(broker.keys.gateways)
        await db.set(broker.keys.gateways, "junk")
        check(await asyncio.wait_for(asked, 60))
        assert await asyncio.wait_for(waits, 60) == await asked
        check(await gateway.ask("k2"))
    load = await broker.load()
    assert (load.accepted, load.cancelled) == (4, 0)
