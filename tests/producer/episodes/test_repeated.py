"""Episodes of a run that is repeated: what tools said in the first one is in its journal, and nobody asks them."""

from __future__ import annotations

import secrets
from dataclasses import replace
from pathlib import Path
from typing import Any

from support.pools.pool import worker

from rolloutmq import RolloutClient
from rolloutmq.messages.journal import Entry, Journal, read
from rolloutmq.producer.episodes import Episode, EpisodeLimits, Step

TASKS = 3


class Dice:
    """Says something else each time that it is asked. asked: how often."""

    asked = 0

    def __init__(self, task: int) -> None:
        self._task = task

    def reset(self) -> list[int]:
        return [5, self._task]

    def step(self, answer: Any) -> Step:
        Dice.asked += 1
        drawn = [secrets.randbelow(30_000) for _ in range(3)]
        return Step(drawn, float(drawn[0]), info={"drawn": drawn})


async def play(url: str, journal: Path, repeat: Path | None, tokens: int = 4) -> list[tuple[Any, ...]]:
    """The episodes of one run, on a worker of its own."""
    Dice.asked = 0
    async with worker(url), RolloutClient(url, journal=journal) as client:
        limits = EpisodeLimits(turns=3)
        playing = client.episodes(
            range(TASKS), Dice, n=2, limits=limits, run="run", repeat=repeat, sampling={"max_new_tokens": tokens}
        )
        found: list[Episode] = [episode async for episode in playing]
    assert all(episode.ok for episode in found), [episode.error for episode in found]
    found.sort(key=lambda it: (it.number, it.sample))
    return [
        (it.history.token_ids.tolist(), it.reward, [turn.info["drawn"] for turn in it.turns])  # type: ignore[index]
        for it in found
    ]


async def test_a_repeat_takes_what_tools_said(redis_db: str, redis_url: str, tmp_path: Path) -> None:
    once = await play(redis_db, tmp_path / "a", None)
    assert Dice.asked == TASKS * 2 * 3
    assert await play(redis_url, tmp_path / "b", tmp_path / "a") == once
    assert Dice.asked == 0


async def test_what_the_model_said_otherwise_is_asked(redis_db: str, redis_url: str, tmp_path: Path) -> None:
    once = await play(redis_db, tmp_path / "a", None)
    assert await play(redis_url, tmp_path / "b", tmp_path / "a", tokens=5) != once
    assert Dice.asked == TASKS * 2 * 3


async def test_a_damaged_note_fails_its_episode_alone(redis_db: str, redis_url: str, tmp_path: Path) -> None:
    """What a journal has is as little trusted as what an environment says."""
    await play(redis_db, tmp_path / "a", None)
    with Journal(tmp_path / "c") as journal:
        for entry in _entries(tmp_path / "a"):
            data = dict(entry.data)
            if data.get("turn") == 0 and data.get("episode") == "run-1-0" and "done" in data:
                data["reward"] = [["x"]] * 3
            journal.add(replace(entry, data=data))
    async with worker(redis_url), RolloutClient(redis_url) as client:
        limits = EpisodeLimits(turns=3)
        playing = client.episodes(
            range(TASKS), Dice, n=2, limits=limits, run="run", repeat=tmp_path / "c", sampling={"max_new_tokens": 4}
        )
        found = {(it.number, it.sample): it async for it in playing}
    wrong = found.pop((1, 0))
    assert (wrong.stop, "step.reward" in (wrong.error or "")) == ("failed", True)
    assert all(episode.ok for episode in found.values())


def _entries(folder: Path) -> list[Entry]:
    return list(read(folder, events=("result", "note")))
