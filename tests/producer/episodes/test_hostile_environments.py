"""Environments that raise what ends loops, answer with anything, ignore cancellation, or are cancelled."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.pools.episodes import SHORT, Counting, Keep, played
from support.pools.pool import eventually, worker

from rolloutmq import BlockingRolloutClient, EpisodeLimits, GenerateJob, RolloutClient
from rolloutmq.producer.data import either
from rolloutmq.worker.scripted.engine import ScriptedEngine

ENDS = (SystemExit(3), asyncio.CancelledError(), GeneratorExit(), BaseExceptionGroup("several", [SystemExit(1)]))


def raising(where: str, error: BaseException, plain: bool) -> type[Counting]:
    def bad(*_: Any) -> Any:
        raise error

    async def bad_coroutine(*_: Any) -> Any:
        raise error

    return type("Raising", (Counting,), {where: bad if plain else bad_coroutine})


async def beside_a_good_one(redis_db: str, client: RolloutClient, make: Callable[[Any], Any]) -> Any:
    """The episode of task 0; that of task 1 is not affected."""
    async with worker(redis_db):
        bad, good = await played(client, lambda task: make(task) if task == 0 else Counting(task), 2)
    assert (good.stop, good.reward) == ("done", 6.0)
    assert client.outstanding == 0
    assert (await client.load()).open_jobs == 0
    return bad


@pytest.mark.parametrize("plain", [True, False], ids=["plain", "coroutine"])
@pytest.mark.parametrize("error", ENDS, ids=lambda error: type(error).__name__)
async def test_what_would_end_a_loop_costs_the_episode(
    redis_db: str, client: RolloutClient, error: BaseException, plain: bool
) -> None:
    for where in ("reset", "step"):
        bad = await beside_a_good_one(redis_db, client, raising(where, error, plain))
        assert bad.stop == "failed"
        assert bad.error.startswith(f"{where}: RuntimeError: {type(error).__name__}: ")
    bad = await beside_a_good_one(redis_db, client, raising("close", error, plain))
    assert bad.stop == "done"


@pytest.mark.parametrize("big", [[5] * 3_000_000, np.full(3_000_000, 5)], ids=["list", "array"])
async def test_too_many_ids_are_refused_before_they_are_looked_at(
    redis_db: str, client: RolloutClient, big: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(_: Any) -> Any:
        raise AssertionError("a job was made of it")

    class Huge(Counting):
        def step(self, answer: Any) -> Any:
            monkeypatch.setattr(GenerateJob, "build", never)
            return big, 0.0, False, {}

    async with worker(redis_db):
        (episode,) = await played(client, Huge, 1)
    assert episode.stop == "failed"
    assert "at most 1048576 token ids, got 3000000" in str(episode.error)


async def test_a_long_observation_is_looked_at_in_a_thread(redis_db: str, client: RolloutClient) -> None:
    seen = []

    class Item(int):
        """Says where it was looked at."""

        def __int__(self) -> int:
            seen.append(threading.current_thread() is threading.main_thread())
            return 5

    class Long(Counting):
        def step(self, answer: Any) -> Any:
            return [Item(5)] * 20_000, 0.0, len(answer.versions) > 1, {}

    async with worker(redis_db):
        await played(client, Long, 1, limits=EpisodeLimits(turns=2))
    assert seen
    assert not any(seen)


class Mute(Exception):
    def __str__(self) -> str:
        raise KeyError("no words")


async def test_an_error_without_words_costs_the_episode(redis_db: str, client: RolloutClient) -> None:
    bad = await beside_a_good_one(redis_db, client, raising("step", Mute(), plain=False))
    assert (bad.stop, bad.error) == ("failed", "step: Mute")


def cancelled(_task: Any) -> Any:
    raise asyncio.CancelledError


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda _: sys.exit(3), "environment: RuntimeError: SystemExit: 3"),
        (cancelled, "environment: RuntimeError: CancelledError"),
        (lambda _: None, "environment: TypeError: NoneType has no method reset"),
        (
            lambda _: type("NoStep", (), {"reset": lambda self: [1]})(),
            "environment: TypeError: NoStep has no method step",
        ),
    ],
    ids=["exit", "cancelled", "none", "without step"],
)
async def test_what_makes_environments_may_fail_in_any_way(
    redis_db: str, client: RolloutClient, make: Callable[[Any], Any], says: str
) -> None:
    bad = await beside_a_good_one(redis_db, client, make)
    assert bad.stop == "failed"
    assert bad.error.startswith(says)


@pytest.mark.parametrize(
    ("step", "says"),
    [
        ((np.zeros((2, 2), int), 0.0, False, {}), "observation=array("),
        ((np.array([1.5]), 0.0, False, {}), "token ids are integers"),
        (([1], torch.ones(2), False, {}), "step.reward=tensor("),
        (([1], 10**400, False, {}), "step.reward="),
        (([{"role": "user", "content": [[[]]]}], 0.0, False, {}), "messages.0.content"),
        (([2**70], 0.0, False, {}), "token_ids"),
        (("a\ud800", 0.0, False, {}), "text"),
    ],
    ids=["matrix", "fractions", "two rewards", "a huge reward", "nested", "huge", "surrogate"],
)
async def test_garbage_costs_the_episode(redis_db: str, client: RolloutClient, step: Any, says: str) -> None:
    bad = await beside_a_good_one(redis_db, client, type("Garbage", (Counting,), {"step": lambda self, answer: step}))
    assert bad.stop == "failed"
    assert says in bad.error


class Stubborn(Counting):
    """Its step ends only when it is let go, whoever cancels it."""

    def __init__(self, task: int) -> None:
        super().__init__(task)
        self.let_go, self.state = asyncio.Event(), "new"

    async def step(self, answer: Any) -> Any:  # type: ignore[override]
        self.state = "stepping"
        while not self.let_go.is_set():
            try:
                await self.let_go.wait()
            except asyncio.CancelledError:
                self.state = "cancelled"
        self.state = "ended"


async def test_deadlines_and_leaving_outlast_a_coroutine_that_ignores_cancellation(
    redis_db: str, client: RolloutClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(either, "GRACE_S", 0.05)
    make = Keep(Stubborn)
    async with worker(redis_db):
        (late,) = await played(client, make, limits=EpisodeLimits(step_s=0.5))
        assert (late.stop, late.error) == ("timeout", "step took longer than 0.5 s")
        playing = asyncio.create_task(played(client, make))
        await eventually(lambda: len(make.made) == 2 and make.made[1].state == "stepping")
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
    assert make.closed == [1, 1]
    assert [environment.state for environment in make.made] == ["cancelled"] * 2
    for environment in make.made:
        environment.let_go.set()
    await eventually(lambda: all(environment.state == "ended" for environment in make.made))


async def test_whenever_it_is_cancelled_nothing_is_left(redis_db: str, client: RolloutClient) -> None:
    moments = 0

    async def moment() -> None:
        nonlocal moments
        moments += 1
        await asyncio.sleep(0)

    class Slow(Counting):
        async def reset(self) -> list[int]:  # type: ignore[override]
            await moment()
            return super().reset()

        async def step(self, answer: Any) -> Any:  # type: ignore[override]
            await moment()
            return super().step(answer)

        async def close(self) -> None:  # type: ignore[override]
            await moment()
            super().close()

    make = Keep(Slow)
    async with worker(redis_db, engine=ScriptedEngine(tokens_per_s=2000.0)):
        for wanted in range(0, 30, 2):  # six episodes have 30 moments
            moments = 0
            playing = asyncio.create_task(played(client, make, 6, concurrency=4))
            await eventually(lambda: moments >= wanted or playing.done())  # noqa: B023 – awaited here
            playing.cancel()
            await asyncio.wait({playing})
            assert make.closed == [1] * len(make.made)
            assert client.outstanding == 0
            assert (await client.load()).open_jobs == 0
        assert [it.reward for it in await played(client, make, 2)] == [6.0, 6.0]


def test_in_the_thread_of_a_plain_loop_ctrl_c_of_an_environment_is_its_own_error(redis_db: str) -> None:
    ready, done = threading.Event(), threading.Event()

    async def serve() -> None:
        async with worker(redis_db):
            ready.set()
            await asyncio.to_thread(done.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        ready.wait(20)
        with BlockingRolloutClient(redis_db) as client:
            (bad,) = client.episodes([0], raising("step", KeyboardInterrupt(), plain=False), sampling=SHORT)
            (good,) = client.episodes([0], Counting, sampling=SHORT)
    finally:
        done.set()
        thread.join()
    assert bad.error == "step: RuntimeError: KeyboardInterrupt: "
    assert good.reward == 6.0


async def test_an_answer_on_its_way_to_a_cancelled_episode_is_nobodys(
    redis_db: str, client: RolloutClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its submission is cut off after the pool has accepted it, and it ends before it can be cancelled."""
    enqueue, put, answers = client.broker.enqueue, client._core.inbox.put, list[Any]()

    async def cut_off(*jobs: Any, **more: Any) -> list[str]:
        await enqueue(*jobs, **more)
        return await asyncio.Event().wait()  # type: ignore[return-value]

    monkeypatch.setattr(client.broker, "enqueue", cut_off)
    monkeypatch.setattr(client._core.inbox, "put", lambda reply: answers.append(reply) or True)
    make = Keep(Counting)
    async with worker(redis_db):
        playing = asyncio.create_task(played(client, make))
        await eventually(lambda: answers)
        playing.cancel()
        await asyncio.wait({playing})
    for answer in answers:
        assert not put(answer)
    assert (make.closed, client.outstanding) == ([1], 0)
