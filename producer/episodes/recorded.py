"""A recorded session as a trainer takes it: its turns, the tree that they are, and its paths as rows."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ...messages.broker import RecordedSessions
from ...messages.errors import InvalidField, NoSuchSession, WaitTimeout
from ...messages.model import RolloutResult
from ..calls import GIVEN, versions_of
from ..training import Row


@dataclass(frozen=True, eq=False)
class RecordedSession:
    """What an agent asked of a gateway under one name, and got. `RolloutClient.take_session` makes it.

    turns: results with `prompt_ids` and `logprobs`, in the order in which they were recorded.
    """

    tenant: str
    name: str
    turns: tuple[RolloutResult, ...]

    @cached_property
    def parents(self) -> tuple[int | None, ...]:
        """For each turn the number of the one that it goes on from, None for one that begins anew.

        That is the turn whose prompt and output are the longest beginning of this one's prompt; of equal ones the
        newest that was there before, as far as there is one. Only a longer prompt goes on from another: samples of one
        prompt, and a turn that was repeated, are siblings. Raises InvalidField for a turn without `prompt_ids`.
        """
        return _parents(self.turns)

    def rows(self, reward: float = float("nan"), group: int = 0) -> list[Row]:
        """A row for each path of the tree, from its first prompt to a turn from which none goes on; in that turn's
        order. Each has this reward and group.

        A row's ids are what the model saw and generated, token by token. Its mask is 1 for sampled tokens. A turn that
        several paths share is in the mask of the first one alone, and given in the others, so each turn is trained
        once. A path without a token of its own that was sampled has no row. `Row.turns` has places in `turns`;
        `Row.stop` is of the last one. Raises InvalidField for a turn without `prompt_ids` or `logprobs`.
        """
        inner, trained, rows = {*self.parents}, set[int](), list[Row]()
        for leaf in range(len(self.turns)):
            if leaf in inner:
                continue
            path, at = [leaf], self.parents[leaf]
            while at is not None and at not in trained:
                path.append(at)
                at = self.parents[at]
            trained.update(path)
            if any(len(self.turns[number].token_ids) for number in path):
                rows.append(self._row(leaf, path, reward, group))
        return rows

    def _row(self, leaf: int, path: list[int], reward: float, group: int) -> Row:
        """path: the turns that this row trains."""
        ids = _whole(leaf, self.turns[leaf])
        mask, logprobs = np.zeros(len(ids), np.int8), np.zeros(len(ids), np.float32)
        versions, turns = np.full(len(ids), GIVEN, np.int64), np.full(len(ids), GIVEN, np.int32)
        for number in path:
            turn = self.turns[number]
            if turn.logprobs is None:
                raise InvalidField(f"turns[{number}].logprobs", None, "log-probabilities: the job has to ask for them")
            end = len(_whole(number, turn))
            at = slice(end - len(turn.token_ids), end)
            mask[at], logprobs[at], versions[at], turns[at] = 1, turn.logprobs, versions_of(turn.segments), number
        stop = self.turns[leaf].finish_reason
        return Row(ids, mask, logprobs, versions, turns, int(np.argmax(mask)), reward, group, stop)


async def take_session(store: RecordedSessions, name: str, tenant: str, timeout: float | None) -> RecordedSession:
    """See RolloutClient.take_session."""
    deadline, pause = None if timeout is None else time.monotonic() + timeout, 0.02
    while True:
        try:
            return RecordedSession(tenant, name, tuple(await store.take(tenant, name)))
        except NoSuchSession as missing:
            if missing.forgotten or timeout == 0:
                raise
            if deadline is not None and time.monotonic() + pause >= deadline:
                raise WaitTimeout(f"waited {timeout:g} s for its first turn: {missing}") from missing
        await asyncio.sleep(pause)
        pause = min(1.0, pause * 2)


def _whole(number: int, turn: RolloutResult) -> npt.NDArray[np.int32]:
    """A turn's prompt and output. Raises InvalidField."""
    if turn.prompt_ids is None:
        raise InvalidField(f"turns[{number}].prompt_ids", None, "the prompt's tokens")
    return np.concatenate([turn.prompt_ids, turn.token_ids])


def _parents(turns: Sequence[RolloutResult]) -> tuple[int | None, ...]:
    """Hashes all beginnings of all turns, in time and memory of the tokens, and compares tokens where hashes agree.

    The hash of ids is the sum of each times a random number for its place, modulo 2^64. Nobody can make two beginnings
    agree who does not know these numbers.
    """
    wholes = [_whole(number, turn) for number, turn in enumerate(turns)]
    lengths = np.array([len(whole) for whole in wholes])
    prompts = lengths - np.array([len(turn.token_ids) for turn in turns])
    order = np.argsort(lengths, kind="stable")
    numbers = np.random.default_rng().integers(0, 1 << 64, int(lengths.max(initial=0)), np.uint64)
    seen, hashes = list[npt.NDArray[np.uint64]](), np.empty(len(turns), np.uint64)
    for number, whole in enumerate(wholes):
        sums = np.concatenate([[np.uint64(0)], np.cumsum(whole.astype(np.uint64) * numbers[: len(whole)])])
        hashes[number] = sums[-1]
        seen.append(sums[lengths[order[: np.searchsorted(lengths, prompts[number], "right", order)]]])

    def parent(number: int) -> int | None:
        found: int | None = None
        agree = np.flatnonzero(seen[number] == hashes[order[: len(seen[number])]])
        for other in order[agree[::-1]].tolist():  # the longest first, of equal ones the newest
            if found is not None and (found < number or lengths[other] < lengths[found]):
                break
            shorter = prompts[other] < prompts[number]
            if shorter and np.array_equal(wholes[other], wholes[number][: lengths[other]]):
                found = other
        return found

    return tuple(parent(number) for number in range(len(turns)))
