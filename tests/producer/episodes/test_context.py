"""An episode whose context is full: it stops, goes on with the newest turns, or with a summary."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.pools.episodes import Counting, played
from support.pools.pool import worker

from rolloutmq import Episode, EpisodeLimits, RolloutClient, SamplingParams


def long(task: int) -> Counting:
    return Counting(task, last=9)


def check(episode: Episode, tokens: int) -> None:
    """Each answer is in one row, behind exactly the tokens that it was sampled behind."""
    for number, turn in enumerate(episode.turns):
        ids = episode.parts[turn.part].token_ids
        assert ids[: turn.start].tolist() == turn.result.prompt_ids.tolist()
        assert ids[turn.start : turn.end].tolist() == turn.result.token_ids.tolist()
        assert turn.end <= tokens
        row = episode.rows()[turn.part]
        assert np.flatnonzero(row.turns == number).tolist() == list(range(turn.start, turn.end))
    assert sum(row.mask.sum() for row in episode.rows()) == sum(len(it.result.token_ids) for it in episode.turns)
    assert {row.reward for row in episode.rows()} == {episode.reward}


async def test_it_stops_when_no_token_is_left(redis_db: str, client: RolloutClient) -> None:
    async with worker(redis_db):
        (episode,) = await played(client, long, limits=EpisodeLimits(tokens=12))
        (turns,) = await played(client, long, limits=EpisodeLimits(turns=2))
    assert (episode.stop, episode.error, episode.reward) == ("context", None, 3.0)
    assert [len(it.result.token_ids) for it in episode.turns] == [4, 3], "the last answer gets what is left"
    check(episode, 12)
    (row,) = episode.rows()
    assert (len(row), row.stop) == (12, "length")
    assert (turns.stop, len(turns.turns), turns.rows()[0].stop) == ("turns", 2, "length")


async def test_it_goes_on_with_the_newest_turns(redis_db: str, client: RolloutClient) -> None:
    async with worker(redis_db):
        (episode,) = await played(client, long, limits=EpisodeLimits(tokens=24, on_full="truncate"))
    assert (episode.stop, len(episode.turns), len(episode.parts)) == ("done", 9, 3)
    check(episode, 24)
    first, second = episode.parts[:2]
    kept = second.token_ids[: episode.turns[4].start].tolist()
    newest = episode.turns[2]
    assert kept == [1, 2, 0, *first.token_ids[newest.start :], 4, 4], (
        "the first prompt, and the newest turns in half of the limit"
    )
    assert second.mask[: len(kept)].sum() == 0, "it is trained once, where it was sampled"


@pytest.mark.parametrize("kind", ["plain", "coroutine"])
async def test_it_goes_on_with_a_summary(redis_db: str, client: RolloutClient, kind: str) -> None:
    seen: list[tuple[int, Any]] = []

    def summarise(episode: Episode, observation: Any) -> list[int]:
        seen.append((len(episode.turns), observation))
        return [7, len(episode.turns)]

    async def later(episode: Episode, observation: Any) -> list[int]:
        return summarise(episode, observation)

    hook = summarise if kind == "plain" else later
    async with worker(redis_db):
        (episode,) = await played(client, long, limits=EpisodeLimits(tokens=24, on_full=hook))
        (wrong,) = await played(client, long, limits=EpisodeLimits(tokens=5, on_full=lambda *_: [1] * 9))
        (broken,) = await played(client, long, limits=EpisodeLimits(tokens=5, on_full=lambda *_: 1 // 0))
    assert seen[0] == (4, [4, 4])
    assert episode.stop == "done"
    assert [part.token_ids[:2].tolist() for part in episode.parts] == [[1, 2], [7, 4], [7, 8]]
    check(episode, 24)
    assert (wrong.stop, len(wrong.rows())) == ("context", 1)
    assert (broken.stop, broken.error) == ("failed", "on_full: ZeroDivisionError: integer division or modulo by zero")


async def test_a_prompt_that_does_not_fit_is_told(redis_db: str, client: RolloutClient) -> None:
    async with worker(redis_db):
        for on_full in ("stop", "truncate"):
            (episode,) = await played(client, long, limits=EpisodeLimits(tokens=3, on_full=on_full))
            assert (episode.stop, episode.rows()) == ("context", [])
        huge = SamplingParams(max_new_tokens=(1 << 20) - 1)
        (refused,) = await played(client, long, sampling=huge)
    assert refused.stop == "failed"
    assert "max_new_tokens" in str(refused.error)
