"""What of episodes is in their client's journal."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.pools.episodes import Counting, played
from support.pools.pool import worker

from rolloutmq import RolloutClient, RolloutResult
from rolloutmq.messages.journal import Entry, read
from rolloutmq.messages.model import ChatMessage
from rolloutmq.producer.episodes.noting import as_plain


@dataclass
class _Own:
    call: ChatMessage
    seconds: float


class Failing(Counting):
    """Its second step raises."""

    def step(self, answer: RolloutResult) -> tuple[list[int], float, bool, dict[str, Any]]:
        if self.turn:
            raise RuntimeError("half a character: \ud800")
        return super().step(answer)


class Unreadable(dict[str, Any]):
    """A map that cannot be read."""

    def items(self) -> Any:
        raise SystemExit(3)


class Hostile(Counting):
    """What it says about a step is no plain data, and cannot be made any."""

    def step(self, answer: RolloutResult) -> tuple[list[int], float, bool, dict[str, Any]]:
        observation, reward, done, _ = super().step(answer)
        return observation, reward, done, {"half a character: \ud800": 1, "own": Unreadable()}


async def notes(redis_db: str, folder: Path, make: Any) -> list[Entry]:
    async with worker(redis_db), RolloutClient(redis_db, journal=folder) as client:
        await played(client, make, run="night")
    return list(read(folder, events="note"))


async def test_each_step_and_the_end_are_noted(redis_db: str, tmp_path: Path) -> None:
    found = await notes(redis_db, tmp_path, Counting)
    results = {entry.job_id: entry.message for entry in read(tmp_path, events="result")}
    for number, entry in enumerate(found[:3]):
        result = results[entry.job_id]
        assert isinstance(result, RolloutResult)
        expected = {"episode": "night-0-0", "turn": number, "reward": number + 1, "done": number == 2}
        seen = {"observation": [number + 1] * 2, "info": {"seen": result.token_ids.tolist()}}
        assert entry.data == expected | seen
    assert found[3].job_id == found[2].job_id
    told = {"episode": "night-0-0", "task": 0, "of_task": 0, "turns": 3, "stop": "done", "return": 6.0}
    assert found[3].data == told
    assert len(found) == 4


async def test_what_ended_an_episode_is_noted(redis_db: str, tmp_path: Path) -> None:
    found = await notes(redis_db, tmp_path, Failing)
    assert [entry.data.get("stop") for entry in found] == [None, "failed"]
    assert "half a character: ?" in found[1].data["error"]


async def test_what_cannot_be_written_costs_no_episode(redis_db: str, tmp_path: Path) -> None:
    found = await notes(redis_db, tmp_path, Hostile)
    assert [entry.data.get("stop") for entry in found] == [None, None, None, "done"]
    assert found[0].data["info"] == {"half a character: ?": 1, "own": "<Unreadable>"}


@pytest.mark.parametrize(
    ("given", "plain"),
    [
        ({1: (2, {3}), "x": b"abc"}, {"1": [2, [3]], "x": "3 bytes"}),
        (np.arange(3), [0, 1, 2]),
        (np.float32(0.5), 0.5),
        ("\ud800", "?"),
        (1 << 70, str(1 << 70)),
        (
            [_Own(ChatMessage(role="tool", content="4"), 0.5)],
            [{"call": {"role": "tool", "content": "4"}, "seconds": 0.5}],
        ),
        (len, repr(len)),
    ],
)
def test_anything_becomes_plain(given: Any, plain: Any) -> None:
    assert as_plain(given) == plain


def test_what_has_no_end_becomes_text() -> None:
    endless: list[Any] = []
    endless.append(endless)
    assert "[...]" in str(as_plain(endless))
