"""Samples as rows for a trainer: every token with its mask, log-probability, version and turn. No torch here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...messages.arguments import each_is
from ...messages.errors import InvalidField
from ...messages.model import RolloutResult, TokenIds
from ..calls import GIVEN, History, Session
from .groups import TrainGroup


@dataclass(frozen=True, slots=True)
class Row:
    """One sample, or one conversation, from its prompt's first token to its last one. Columns have one length, n.

    ids: (n,) int32. mask: (n,) int8, 1 for tokens that the model generated. logprobs: (n,) float32, at each generated
    token its log-probability under the weights that sampled it; 0 at others. versions: (n,) int64, those weights; -1 at
    others. turns: (n,) int32, the number of the generated turn, from 0; -1 at others. prompt: tokens before the first
    generated one. reward: NaN if there is none. group: rows of one prompt have one number. stop: the finish_reason.
    """

    ids: TokenIds
    mask: npt.NDArray[np.int8]
    logprobs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int64]
    turns: npt.NDArray[np.int32]
    prompt: int
    reward: float = float("nan")
    group: int = 0
    stop: str = "stop"

    def __len__(self) -> int:
        return len(self.ids)

    @classmethod
    def of_result(cls, result: RolloutResult, reward: float = float("nan"), group: int = 0) -> Row:
        """A result of one turn. Raises InvalidField if it does not know its prompt or has no log-probabilities."""
        if result.prompt_ids is None:
            raise InvalidField(
                "prompt_ids", None, f"the prompt of job {result.job_id}: submit the job again to know it"
            )
        if result.logprobs is None:
            raise InvalidField("logprobs", None, f"log-probabilities: job {result.job_id} did not ask for them")
        history = History().given(result.prompt_ids).generated(result)
        return cls.of_session(history, reward, group, result.finish_reason)

    @classmethod
    def of_session(
        cls, history: History | Session, reward: float = float("nan"), group: int = 0, stop: str = "stop"
    ) -> Row:
        """A conversation of any number of turns. Neighbouring generated tokens are one turn."""
        mask = history.mask.astype(np.int8)
        begins = np.diff(mask, prepend=np.int8(0)) == 1
        turns = np.where(mask == 1, np.cumsum(begins) - 1, GIVEN).astype(np.int32)
        logprobs = np.where(mask == 1, history.logprobs, np.float32(0)).astype(np.float32)
        prompt = int(np.argmax(mask)) if mask.any() else len(mask)
        return cls(history.token_ids, mask, logprobs, history.versions, turns, prompt, reward, group, stop)


def rows_of(groups: Iterable[TrainGroup]) -> list[Row]:
    """The rows of a feed's groups, group by group. A group's number is its prompt's in the books.

    Raises InvalidField as `Row.of_result` does, for what is no TrainGroup, and for rewards that are not one for each
    result.
    """
    rows: list[Row] = []
    for group in each_is("groups", groups, TrainGroup, "a TrainGroup, as a feed gives it"):
        rewards = group.rewards or [float("nan")] * len(group.results)
        if len(rewards) != len(group.results):
            raise InvalidField("rewards", rewards, f"one for each of {len(group.results)} results, or none")
        rows += [
            Row.of_result(result, reward, group.number) for result, reward in zip(group.results, rewards, strict=True)
        ]
    return rows


def rows_given(rows: Iterable[Row]) -> list[Row]:
    """What a caller gives as rows, also from a generator. Raises InvalidField for what is no Row."""
    return each_is("rows", rows, Row, "a Row: rows_of makes them of groups")
