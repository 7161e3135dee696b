"""The event loop of a plain program lives as long as its client, and no call waits for ever for it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

import pytest
from support.pools.pool import worker
from support.specimens.messages import SHORT, tokens

from rolloutmq import BlockingRolloutClient, GroupRules, RolloutClient, RolloutMQError, RolloutResult, Staleness
from rolloutmq.producer.loop_thread import Items, LoopThread

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def thread() -> Iterator[LoopThread]:
    made = LoopThread("the loop")
    yield made
    made.close()


async def answer() -> int:
    return 42


async def fail(error: BaseException) -> None:
    raise error


ENDS = [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError(), TimeoutError("late")]


@pytest.mark.parametrize("error", ENDS, ids=repr)
def test_whatever_is_raised_reaches_the_caller_and_the_loop_goes_on(thread: LoopThread, error: BaseException) -> None:
    for _ in range(2):
        with pytest.raises(type(error)) as raised:
            thread.run(fail(error))
        assert raised.value is error
    assert thread.run(answer()) == 42


def test_the_loop_outlives_a_task_that_nobody_waits_for(thread: LoopThread) -> None:
    async def begin() -> asyncio.Task[None]:
        return asyncio.create_task(fail(SystemExit(3)))

    async def end(task: asyncio.Task[None]) -> None:
        await task

    task = thread.run(begin())
    with pytest.raises(SystemExit):
        thread.run(end(task))
    assert thread.run(answer()) == 42


def test_its_own_thread_is_told_that_it_would_wait_for_itself(thread: LoopThread) -> None:
    async def ask_itself() -> int:
        return thread.run(answer())

    async def close_itself() -> None:
        thread.close()

    for asked in (ask_itself(), close_itself()):
        with pytest.raises(RolloutMQError, match="the loop was called by a function that its own thread runs"):
            thread.run(asked)
    assert thread.run(answer()) == 42


def test_collecting_an_iterator_waits_for_nothing_and_the_next_call_for_its_end(thread: LoopThread) -> None:
    ended, done = asyncio.Event(), list[str]()

    class Slow:
        def __aiter__(self) -> Slow:
            return self

        async def __anext__(self) -> int:
            return 1

        async def aclose(self) -> None:
            await ended.wait()
            done.append("left")

    async def work() -> None:
        done.append("work")

    items = Items(thread, Slow())
    assert next(items) == 1
    del items
    assert done == []
    thread.loop.call_soon_threadsafe(ended.set)
    thread.run(work())
    assert done == ["left", "work"]


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("error", ENDS, ids=repr)
async def test_what_a_score_raises_reaches_a_plain_loop(
    redis_db: str, serving: None, error: BaseException, later: bool
) -> None:
    broken = True

    def score(results: Sequence[RolloutResult]) -> list[float]:
        if broken:
            raise error
        return [1.0] * len(results)

    async def score_later(results: Sequence[RolloutResult]) -> list[float]:
        return score(results)

    def plain_loop() -> None:
        nonlocal broken
        with BlockingRolloutClient(redis_db) as client:
            feed = client.feed(Staleness(2, 4, "mark"), GroupRules(score=score_later if later else score))
            feed.submit(tokens(n=2, sampling=SHORT), timeout=20)
            with pytest.raises((type(error), RolloutMQError)) as raised:
                feed.batch(timeout=20)
            assert any("stay in flight" in note for note in raised.value.__notes__)
            if isinstance(error, GeneratorExit | asyncio.CancelledError):
                assert str(raised.value) == f"GroupRules.score raised {error!r}"
            else:
                assert raised.value is error
            broken = False
            assert [len(group.results) for group in feed.batch(timeout=20)] == [2]

    error.__notes__ = []
    await asyncio.to_thread(plain_loop)


async def test_a_before_ack_that_ends_the_reader_is_told_to_whoever_waits(redis_db: str) -> None:
    def before_ack(closing: bool) -> bool:
        if not closing:
            raise SystemExit(3)
        return True

    async with worker(redis_db), RolloutClient(redis_db, before_ack=before_ack) as client:
        await client.wait(await client.submit(tokens()), 20)
        with pytest.raises(RolloutMQError, match=r"the reader of client .* stopped") as raised:
            await client.wait(await client.submit(tokens(min_version=9)), 20)
        assert isinstance(raised.value.__cause__, SystemExit)
