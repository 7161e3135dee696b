"""One input of a job that generates nothing, as an engine takes and answers it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

TaskName = Literal["embed", "reward", "score"]
TASK_FEATURES: dict[TaskName, str] = {"embed": "task:embed", "reward": "task:reward", "score": "task:score"}
POOLING_FEATURES = frozenset({TASK_FEATURES["embed"], TASK_FEATURES["reward"]})
"""Features of engines that pool their input and generate nothing."""


@dataclass(frozen=True, slots=True)
class TaskRequest:
    """One forward pass over `token_ids`.

    request_id, cache_key: as in EngineRequest.
    token_ids: (n,) int32. start: for a score, the first token whose log-probability is wanted, >= 1.
    dimensions, normalize: for an embedding, as EmbedJob has them.
    """

    request_id: str
    task: TaskName
    token_ids: npt.NDArray[np.int32]
    cache_key: str
    start: int = 1
    dimensions: int | None = None
    normalize: bool = True


@dataclass(frozen=True, slots=True)
class TaskOutput:
    """The result of a TaskRequest.

    values: float32: (d,) of an embedding, (k,) of a reward model, (n - start,) log-probabilities of a score.
    finished: False if it was aborted. Then there are no values, and the same request can be made again.
    """

    values: npt.NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))
    finished: bool = False
