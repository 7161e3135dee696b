"""An episode as data: its turns, and its tokens as rows for a trainer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from ...messages.model import RolloutResult
from ..calls import History
from ..training import Row

Stop = Literal["done", "turns", "context", "timeout", "failed"]
_FINISH = {"done": "stop", "turns": "length", "context": "length", "timeout": "abort", "failed": "abort"}


@dataclass(slots=True, eq=False)
class Turn:
    """An answer of the model, and what the environment said to it.

    result: the answer. reward, info: of its step; 0 and empty if the step failed. part, start, end: its generated
    tokens are those from start to end of the episode's part of that number.
    """

    result: RolloutResult
    part: int
    start: int
    end: int
    reward: float = 0.0
    info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Episode:
    """An episode that has ended.

    task: as it was given. number: the task's. sample: of its `n` episodes, from 0. turns: in order.
    parts: its tokens as columns of one length: `token_ids` (t,) int32; `mask` (t,) uint8, 1 for tokens that the model
        sampled; `logprobs` (t,) float32, NaN for others; `versions` (t,) int64, -1 for others. There is one part,
        unless `EpisodeLimits.on_full` went on with another context.
    stop: "done": the environment said so. "turns", "context": a limit of turns or tokens. "timeout": a deadline was
        exceeded. "failed": the environment raised an error, or no worker could answer. error: what happened in the
        last two cases.
    """

    task: Any
    number: int
    sample: int
    turns: list[Turn] = field(default_factory=list)
    parts: list[History] = field(default_factory=lambda: [History()])
    stop: Stop = "done"
    error: str | None = None

    @property
    def ok(self) -> bool:
        """Whether it ended without an error: its reward is what it earned."""
        return self.error is None

    @property
    def reward(self) -> float:
        """The sum of its turns' rewards."""
        return float(sum(turn.reward for turn in self.turns))

    @property
    def history(self) -> History:
        """Its newest part."""
        return self.parts[-1]

    def rows(self) -> list[Row]:
        """A row for each part in which the model answered; `RolloutBatch.of` takes them.

        Each has the whole episode's reward, and the task's number as its group. `Row.turns` has places in `turns`, so
        `episode.turns[i].reward` gives a turn its own credit. `Row.stop` is "stop" if the episode is done, "length" at
        a limit, and "abort" after an error.
        """
        return [row for part in range(len(self.parts)) if (row := self._row(part)) is not None]

    def _row(self, part: int) -> Row | None:
        mine = [(number, turn) for number, turn in enumerate(self.turns) if turn.part == part]
        if not mine:
            return None
        row = Row.of_session(self.parts[part], self.reward, self.number, _FINISH[self.stop])
        numbers = np.full(len(row), -1, np.int32)
        for number, turn in mine:
            numbers[turn.start : turn.end] = number
        return replace(row, turns=numbers, prompt=mine[0][1].start)
