"""What many tasks ask at the same time goes to Redis together, and each gets what is its own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisGone
from support.pools.pool import eventually
from support.specimens.messages import tokens

from rolloutmq import GenerateJob, InvalidField, PoolBusy, RolloutClient
from rolloutmq.messages import Caps
from rolloutmq.producer.inbox import Together
from rolloutmq.producer.sending import enqueued_together


class Asked:
    """Answers with the double, once it is let go; 13 is refused, and with 99 nothing is answered."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []
        self.let_go = asyncio.Event()

    async def __call__(self, numbers: Sequence[int]) -> list[int | Exception]:
        self.calls.append([*numbers])
        await self.let_go.wait()
        if 99 in numbers:
            raise RedisGone("gone")
        return [ValueError("13") if number == 13 else 2 * number for number in numbers]


async def test_what_is_asked_meanwhile_is_asked_together() -> None:
    asked = Asked()
    ask = Together(asked)
    tasks = [asyncio.create_task(ask(number)) for number in (1, 2, 13, 4)]
    await eventually(lambda: len(asked.calls) == 1)
    tasks[3].cancel()
    asked.let_go.set()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert asked.calls == [[1], [2, 13]]  # who has given up is not asked for
    assert found[:2] == [2, 4]
    assert isinstance(found[2], ValueError)
    assert await ask(5) == 10  # alone, at once
    asked.let_go.clear()
    tasks = [asyncio.create_task(ask(number)) for number in (6, 99, 7)]
    await eventually(lambda: asked.calls[-1] == [6])
    asked.let_go.set()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert found[0] == 12
    assert [type(one) for one in found[1:]] == [RedisGone] * 2
    assert await ask(8) == 16


async def test_whoever_is_cancelled_while_it_asks_leaves_the_others_their_answers() -> None:
    asked = Asked()
    ask = Together(asked)
    first, second = (asyncio.create_task(ask(number)) for number in (1, 2))
    await eventually(lambda: len(asked.calls) == 1)
    first.cancel()
    await eventually(lambda: len(asked.calls) == 2)
    asked.let_go.set()
    assert await second == 4


class Narrow:
    """A broker with room for two jobs in all, which knows one id as another job's."""

    def __init__(self, taken: str = "") -> None:
        self.taken, self.room, self.accepted = taken, 2, list[str]()

    async def enqueue(self, jobs: Sequence[GenerateJob], frames: Any = None) -> list[str]:
        if any(job.id == self.taken for job in jobs):
            raise InvalidField("id", self.taken, "another")
        states: list[str] = []
        for job in jobs:
            if job.n > self.room:
                raise PoolBusy("full", states, "jobs")
            self.room -= job.n
            self.accepted.append(job.id)
            states.append("new")
        return states


async def test_a_job_that_is_refused_is_refused_for_its_own_caller() -> None:
    one, other, third = tokens(), tokens(), tokens()
    broker = Narrow(taken=other.id)
    found = await enqueued_together(broker, [[one], [other], [third]])  # type: ignore[arg-type]
    assert found[0] == found[2] == (["new"], None)
    assert isinstance(found[1], InvalidField)
    assert broker.accepted == [one.id, third.id]


async def test_a_job_without_room_keeps_nobody_out_who_has_some() -> None:
    small, large, last = tokens(), tokens(n=2), tokens()
    broker = Narrow()
    found = await enqueued_together(broker, [[small], [large], [last]])  # type: ignore[arg-type]
    assert [states for states, _ in found] == [["new"], [""], ["new"]]  # type: ignore[misc]
    assert [busy is None for _, busy in found] == [True, False, True]  # type: ignore[misc]
    assert broker.accepted == [small.id, last.id]


@pytest.mark.one_shard  # each shard has its part of the caps
async def test_a_full_pool_refuses_only_what_has_no_room(redis_db: str) -> None:
    async with RolloutClient(redis_db, caps=Caps(jobs=3)) as client:
        found = await asyncio.gather(*(client.submit(tokens()) for _ in range(8)), return_exceptions=True)
        assert sorted(type(one).__name__ for one in found) == ["JobHandle"] * 3 + ["PoolBusy"] * 5
        assert client.outstanding == 3
