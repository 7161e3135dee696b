"""A gateway's jobs leave nothing behind, however they end; and a Redis that is away for a while ends none of them."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing

import pytest
from support.pools.pool import check_scripted, eventually, worker
from support.specimens.messages import tokens

from rolloutmq import GenerateJob, SamplingParams
from rolloutmq.messages import Broker
from rolloutmq.messages.broker import RecordedSessions, broker_of
from rolloutmq.messages.model import ScoreJob, ScoreResult
from rolloutmq.messages.redis import connect
from rolloutmq.ops.gateway.core import Core, Keep
from rolloutmq.ops.redis.embedded import EmbeddedRedis
from rolloutmq.producer.calls import tasks
from rolloutmq.producer.inbox import Group
from rolloutmq.worker.scripted.engine import ScriptedEngine

CLIENT = "acme/gw-1"
Ask = Callable[[Core, int, Keep | None], Awaitable[None]]


async def join(_: str) -> str:
    return CLIENT


@pytest.fixture
async def core(redis_db: str) -> AsyncIterator[Core]:
    made = Core(redis_db, "default", join)
    yield made
    await made.close()


@pytest.fixture
async def alone(redis_url: str) -> AsyncIterator[Core]:
    """With a server of the test's own."""
    made = Core(redis_url, "default", join)
    yield made
    await made.close()


def jobs(count: int) -> list[GenerateJob]:
    sampling = SamplingParams(max_new_tokens=count)
    return [tokens(session_id="s", sampling=sampling), tokens(session_id="s", n=2)]


async def plain(core: Core, count: int, keep: Keep | None = None) -> None:
    await core.run("acme", jobs(count), keep)


async def streamed(core: Core, count: int, keep: Keep | None = None) -> None:
    stream = await core.stream("acme", jobs(count), keep)
    async with aclosing(stream.deltas(stay=False)) as deltas:
        async for _ in deltas:
            pass


async def scored(core: Core, _: int, __: Keep | None = None) -> None:
    member = await core.member("acme")
    await tasks.run_tasks(member.core, [ScoreJob.build(token_ids=[1, 2], continuations=[[3], [4]])], ScoreResult)


async def nothing_left(core: Core, broker: Broker) -> None:
    """Return when nothing of any job is in the pool, on the reply stream or in the inbox."""
    inbox = (await core.member("acme")).core.inbox

    async def nothing() -> bool:
        return (await broker.load()).open_jobs == await broker.count_replies(CLIENT) == inbox.jobs == len(inbox) == 0

    await eventually(nothing)


def silence(server: EmbeddedRedis) -> None:
    """The server answers nobody, until `speak`."""
    os.kill(server.pid, signal.SIGSTOP)


def speak(server: EmbeddedRedis) -> None:
    os.kill(server.pid, signal.SIGCONT)


@pytest.mark.parametrize("ask", [plain, streamed, scored])
async def test_who_hangs_up_as_a_job_ends_leaves_nothing(core: Core, redis_db: str, broker: Broker, ask: Ask) -> None:
    """Hundreds of times, at any moment: some of the jobs have ended, and nobody here has read of it yet."""
    dice, hung_up = random.Random(7), 0

    async def client() -> None:
        nonlocal hung_up
        try:
            async with asyncio.timeout(dice.uniform(0.0, 0.15)):  # when it hangs up
                await ask(core, dice.choice([1, 2, 5, 20]), None)
        except TimeoutError:
            hung_up += 1

    async with worker(redis_db, engine=ScriptedEngine(tokens_per_s=400.0), max_running=64):
        for _ in range(6):
            await asyncio.gather(*(client() for _ in range(50)))
        await nothing_left(core, broker)
    assert hung_up > 20, "nobody hung up: this shows nothing"


@pytest.mark.parametrize("ask", [plain, streamed])
async def test_jobs_given_up_while_redis_is_silent_are_cancelled_later(
    alone: Core, redis_server: EmbeddedRedis, redis_url: str, caplog: pytest.LogCaptureFixture, ask: Ask
) -> None:
    async with connect(redis_url, pool="default") as db:
        broker = broker_of(db, "default")

        async def queued() -> bool:
            return (await broker.load()).open_jobs == 6

        asked = [asyncio.create_task(ask(alone, 5, None)) for _ in range(3)]
        await eventually(queued)
        silence(redis_server)
        for one in asked:
            one.cancel()
        await eventually(lambda: "not cancelled yet" in caplog.text)
        speak(redis_server)
        await nothing_left(alone, broker)


@pytest.mark.parametrize("ask", [plain, streamed])
async def test_turns_are_recorded_however_long_redis_is_silent(
    alone: Core, redis_server: EmbeddedRedis, redis_url: str, caplog: pytest.LogCaptureFixture, ask: Ask
) -> None:
    async with worker(redis_url), connect(redis_url, pool="default") as db:
        broker = broker_of(db, "default")
        sessions, began = RecordedSessions(broker), 0

        async def keep(groups: list[Group]) -> None:
            nonlocal began
            began += 1
            if began == 1:
                silence(redis_server)
            for one in (one for group in groups for one in group.results):
                await sessions.record("acme", "s", f"{one.job_id}.{one.sample}", one)

        asked = asyncio.create_task(ask(alone, 5, keep))  # type: ignore[arg-type]
        await eventually(lambda: began > 1)
        speak(redis_server)
        await asked
        assert len(await sessions.take("acme", "s")) == 3
        await nothing_left(alone, broker)


async def test_streams_go_on_when_redis_was_silent(
    alone: Core, redis_server: EmbeddedRedis, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    shown: list[list[int]] = [[] for _ in range(4)]

    async def client(mine: list[int]) -> None:
        stream = await alone.stream("acme", jobs(200)[:1])
        async with aclosing(stream.deltas(stay=False)) as deltas:
            async for delta in deltas:
                if delta.restarted:
                    mine.clear()
                mine += delta.token_ids.tolist()
        assert delta.result is not None
        assert delta.result.token_ids.tolist() == mine
        check_scripted(delta.result, 3)

    async with worker(redis_url, engine=ScriptedEngine(tokens_per_s=50.0)), connect(redis_url, pool="default") as db:
        clients = [asyncio.create_task(client(mine)) for mine in shown]
        await eventually(lambda: all(shown))
        silence(redis_server)
        await eventually(lambda: "streamed jobs cannot be read" in caplog.text)
        speak(redis_server)
        await asyncio.gather(*clients)
        assert [len(mine) for mine in shown] == [200] * 4
        await nothing_left(alone, broker_of(db, "default"))
