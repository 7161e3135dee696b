"""Scored samples on their way from the rollouts to TRL's trainer."""

from __future__ import annotations

import queue
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample


@dataclass(slots=True)
class PoolSample(RolloutSample):  # type: ignore[misc]  # TRL publishes no types
    """A RolloutSample of TRL's: one row for training, and which weights sampled it.

    model_version: TRL's number of the version that sampled the conversation's oldest token.
    versions: (t,) int64, of each of input_ids the pool's version that sampled it; -1 for tokens that were given.
    number: of its prompt in the books. sample: which of the prompt's samples it belongs to. rows: how many rows that
    has.
    staleness: updates between model_version and the trainer's when it took the sample; None before that.
    """

    versions: npt.NDArray[np.int64] | None = None
    number: int = -1
    sample: int = -1
    rows: int = 1
    staleness: int | None = None

    @property
    def key(self) -> tuple[int, int]:
        """Of the conversation that it is a row of."""
        return self.number, self.sample

    @property
    def tokens(self) -> int:
        """Tokens of it that are trained on."""
        return int(self.completion_mask.sum())


def as_pool_sample(sample: Any, version: int, versions: list[int], place: tuple[int, int, int]) -> PoolSample:
    """TRL's sample with what the pool knows of it. place: `number`, `sample` and `rows`."""
    known = {field.name: getattr(sample, field.name) for field in fields(RolloutSample)}
    known["model_version"] = version
    number, which, rows = place
    return PoolSample(**known, versions=np.asarray(versions, np.int64), number=number, sample=which, rows=rows)


class SampleQueue(queue.Queue[PoolSample]):
    """The buffer that TRL's trainer reads: `judge` says of each sample, when its turn comes, whether it is trained."""

    def __init__(self, judge: Callable[[PoolSample], bool]) -> None:
        super().__init__()
        self._judge = judge
        self.bound = 0
        """Most samples in it; 0 for any number. Set when the worker starts."""

    def put_nowait(self, item: PoolSample) -> None:
        """Raises queue.Full at the bound."""
        if self.bound and self.qsize() >= self.bound:
            raise queue.Full
        super().put_nowait(item)

    def get(self, block: bool = True, timeout: float | None = None) -> PoolSample:
        """The next sample that is to be trained. Raises queue.Empty if none comes for `timeout` seconds."""
        while True:
            sample = super().get(block, timeout)
            if self._judge(sample):
                return sample
