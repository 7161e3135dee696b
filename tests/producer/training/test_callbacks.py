"""The functions of GroupRules: errors reach the caller and cost no sample, and scores do not wait for each other."""

from __future__ import annotations

import asyncio
import gc
import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
from support.pools.feeds import in_full, prompts
from support.pools.pool import eventually

from rolloutmq import InvalidField, RolloutClient, RolloutMQError, RolloutResult, Staleness, WaitTimeout
from rolloutmq.producer.training import GroupRules, RolloutFeed, rewards_differ

MARK4 = Staleness(eta=0, batch_size=4, on_stale="mark")
"""Nobody publishes here: all samples are of version 0."""
ONES = [1.0, 1.0]


def place_of(results: Sequence[RolloutResult]) -> int:
    return int(results[0].metadata["place"])


class Judge:
    """Functions of GroupRules that raise for the prompt of one place as long as it is `broken`."""

    def __init__(self, bad: int, error: BaseException | None = None) -> None:
        self.bad, self.broken = bad, True
        self.error = error or ValueError(f"no judge for {bad}")

    def judge(self, results: Sequence[RolloutResult]) -> None:
        if self.broken and place_of(results) == self.bad:
            raise self.error

    def rules(self, which: str) -> GroupRules:
        def keep(result: RolloutResult) -> bool:
            self.judge([result])
            return True

        def score(results: Sequence[RolloutResult]) -> list[float]:
            self.judge(results)
            return ONES

        async def score_later(results: Sequence[RolloutResult]) -> list[float]:
            await asyncio.sleep(0)
            return score(results)

        def score_by_place(results: Sequence[RolloutResult]) -> list[float]:
            return [float(place_of(results))] * 2

        def teaches(rewards: Sequence[float]) -> bool:
            if self.broken and rewards[0] == self.bad:
                raise self.error
            return True

        return {
            "keep": GroupRules(keep=keep),
            "score": GroupRules(score=score),
            "coroutine": GroupRules(score=score_later),
            "samples": GroupRules(score=score_later, deliver="samples"),
            "teaches": GroupRules(score=score_by_place, teaches=teaches),
        }[which]


@pytest.mark.parametrize("which", ["keep", "score", "coroutine", "samples", "teaches"])
async def test_one_that_always_raises_holds_up_no_others(client: RolloutClient, serving: None, which: str) -> None:
    judge = Judge(bad=1)
    feed = client.feed(MARK4, judge.rules(which))
    loop = feed.batches(prompts(8), timeout=20)
    places: list[int] = []
    raised: list[ValueError] = []
    while len(raised) < 2:
        try:
            batch = await anext(loop)
        except ValueError as error:
            raised.append(error)
            continue
        places += [group.metadata["place"] for group in batch]
        feed.train(batch)
        feed.advance(feed.books.version + 1)
    assert list(map(str, raised)) == ["no judge for 1"] * 2, "when it happened, and when nothing else was to come"
    assert "for prompt 1. Its samples stay in flight" in raised[0].__notes__[0]
    in_full(feed, 14, 2)
    assert sorted(set(places)) == [0, 2, 3, 4, 5, 6, 7]
    judge.broken = False
    (group,) = await anext(loop)
    assert (group.metadata["place"], group.samples) == (1, (0, 1))
    feed.train([group])
    in_full(feed, 16, 0)
    with pytest.raises(StopAsyncIteration):
        await anext(loop)


async def test_scores_are_awaited_beside_each_other_within_a_bound(client: RolloutClient, serving: None) -> None:
    together, at_once, most = asyncio.Event(), 0, 0

    async def score(results: Sequence[RolloutResult]) -> list[float]:
        nonlocal at_once, most
        at_once, most = at_once + 1, max(most, at_once + 1)
        if at_once == 3:
            together.set()
        await together.wait()
        at_once -= 1
        return ONES

    feed = client.feed(Staleness(0, 16, "mark"), GroupRules(score=score, score_concurrency=3))
    async with asyncio.timeout(60):  # one after the other they would wait for ever
        batch = await anext(feed.batches(prompts(8)))
    assert [group.rewards for group in batch] == [ONES] * 8
    assert most == 3


async def test_a_slow_score_holds_up_its_own_group_only(client: RolloutClient, serving: None) -> None:
    done, asked = asyncio.Event(), list[int]()

    async def score(results: Sequence[RolloutResult]) -> list[float]:
        asked.append(place_of(results))
        if place_of(results) == 0:
            await done.wait()
        return ONES

    feed = client.feed(MARK4, GroupRules(score=score))
    for job in prompts(2):
        await feed.submit(job, 5)
    async with asyncio.timeout(60):
        assert (await feed.take()).number == 1
        with pytest.raises(WaitTimeout):
            await feed.take(0.02)
        done.set()
        assert (await feed.take()).number == 0
    assert sorted(asked) == [0, 1], "each group is scored once, whatever its callers do"


async def test_what_is_raised_while_nobody_waits_reaches_the_next_call(client: RolloutClient, serving: None) -> None:
    fail, tries = asyncio.Event(), itertools.count()

    async def score(results: Sequence[RolloutResult]) -> list[float]:
        await fail.wait()
        if next(tries) == 0:
            raise ValueError("no judge")
        return ONES

    feed = client.feed(MARK4, GroupRules(score=score))
    await feed.submit(next(prompts(1)), 5)
    await eventually(lambda: being_scored(feed))
    fail.set()
    await eventually(lambda: not feed._core._beside, what="the score has failed")
    with pytest.raises(ValueError, match="no judge"):
        await feed.take(20)
    assert (await feed.take(20)).rewards == ONES


async def being_scored(feed: RolloutFeed) -> bool:
    await feed._pool.pump()
    return any(asked.scoring for asked in feed._pool.asked.values())


@pytest.mark.parametrize(
    "error", [StopIteration(), StopAsyncIteration(), asyncio.CancelledError(), GeneratorExit()], ids=repr
)
@pytest.mark.parametrize("later", [False, True])
async def test_what_would_end_a_loop_without_a_word_is_an_error(
    client: RolloutClient, serving: None, error: BaseException, later: bool
) -> None:
    """For example `anext` on a source of judges that has run dry."""

    async def score_later(results: Sequence[RolloutResult]) -> list[float]:
        raise error

    def score(results: Sequence[RolloutResult]) -> list[float]:
        raise error

    feed = client.feed(MARK4, GroupRules(score=score_later if later else score))
    loop = feed.batches(prompts(1), timeout=20)
    with pytest.raises((RolloutMQError, RuntimeError), match=type(error).__name__):
        await anext(loop)
    in_full(feed, 0, 2)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("which", ["keep", "score", "coroutine", "teaches"])
async def test_what_ends_a_program_reaches_the_caller_and_no_other_task(
    client: RolloutClient, serving: None, error: BaseException, which: str
) -> None:
    judge = Judge(bad=0, error=error)
    feed = client.feed(MARK4, judge.rules(which))
    loop = feed.batches(prompts(1), timeout=20)
    raised: BaseException | None = None
    try:  # here, and not in pytest.raises: the task that runs this must not end with it
        await anext(loop)
    except (SystemExit, KeyboardInterrupt) as found:
        raised = found
    assert raised is error
    in_full(feed, 0, 2)
    judge.broken = False
    (group,) = await anext(loop)
    assert group.number == 0


@pytest.mark.parametrize(
    "rewards",
    [
        None,
        1.0,
        [1.0],
        [1.0, None],
        ["good", "bad"],
        [[1.0, 2.0], [1.0]],
        "12",
        ["1", "2"],
        {0: 1.0, 1: 0.0},
        {0.0, 1.0},
    ]
    + [[0.0, bad] for bad in (math.nan, math.inf, -math.inf)],
    ids=repr,
)
async def test_rewards_that_are_no_rewards(client: RolloutClient, serving: None, rewards: Any) -> None:
    feed = client.feed(MARK4, GroupRules(score=lambda results: rewards))
    loop = feed.batches(prompts(1), timeout=20)
    with pytest.raises(
        InvalidField, match=r"rewards=.*: a list of one number for each of 2 results|rewards\[1\]=.*: a finite"
    ):
        await anext(loop)
    rewards = ONES
    assert [group.rewards for group in await anext(loop)] == [ONES]


async def test_a_client_may_close_while_groups_are_scored(
    redis_db: str, serving: None, recwarn: pytest.WarningsRecorder
) -> None:
    async def score(results: Sequence[RolloutResult]) -> list[float]:
        await asyncio.Event().wait()
        return ONES

    async with RolloutClient(redis_db) as client:
        feed = client.feed(MARK4, GroupRules(score=score, score_concurrency=1))
        for job in prompts(2):
            await feed.submit(job, 5)
        await eventually(lambda: scoring_both(feed))
    in_full(feed, 0, 4)
    gc.collect()
    assert not [it for it in recwarn if "never awaited" in str(it.message)]


async def scoring_both(feed: RolloutFeed) -> bool:
    await feed._pool.pump()
    return len(feed._core._beside) == 2


async def judge_later(_given: Any) -> bool:
    return True


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("keep", judge_later),
        ("teaches", judge_later),
        ("keep", True),
        ("score", [1.0]),
        ("score_concurrency", 0),
        ("score_concurrency", True),
        ("partials", 1),
    ],
)
def test_what_cannot_be_called_is_refused(field: str, value: Any) -> None:
    """The result of a coroutine function is always true: it would keep everything."""
    with pytest.raises(InvalidField) as raised:
        GroupRules(**({"score": rewards_differ} | {field: value}))
    assert raised.value.field == field
