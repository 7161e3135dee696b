"""Recorded samples through the trainer's own loss function: which of them, and which of their tokens, made it large."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ....messages.errors import InvalidField
from ....producer.training import Row
from .. import Recorded
from .properties import user_function

if TYPE_CHECKING:
    from ....producer.training.batch import RolloutBatch

SHOWN = 20
"""So many samples are printed."""
TOKENS = 5
"""So many tokens of each sample are named."""


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """A generated token: its place in the sample, its id, the weights that sampled it, and its part of the loss."""

    place: int
    token_id: int
    version: int
    loss: float


@dataclass(frozen=True, slots=True)
class SampleLoss:
    """A sample's loss. share: its part of the sum of all absolute losses. tokens: those with the largest absolute loss,
    if the function gives one for each."""

    sample: str
    worker: str
    versions: Sequence[int]
    loss: float
    share: float
    tokens: Sequence[TokenLoss]


@dataclass(frozen=True, slots=True)
class Losses:
    """Samples by loss: those whose loss is no finite number first, then the largest absolute loss first. total: the sum
    of all losses. left_out: why samples have none, and how many."""

    total: float
    samples: Sequence[SampleLoss]
    left_out: Mapping[str, int]

    def lines(self) -> list[str]:
        """For people."""
        lines = [f"{len(self.samples):,} samples, total loss {self.total:.6g}"]
        for one in self.samples[:SHOWN]:
            versions = ",".join(map(str, one.versions))
            lines.append(f"{one.loss:12.6g}  {one.share:6.1%}  {one.sample}  versions {versions}, worker {one.worker}")
            lines += [
                f"{'':14}token {at.place} (id {at.token_id}, version {at.version}): {at.loss:.6g}" for at in one.tokens
            ]
        return lines + [f"left out: {why} ({count:,})" for why, count in self.left_out.items()]


def losses_of(samples: Iterable[Recorded], name: str) -> Losses:
    """The loss of each sample by MODULE:FUNCTION(batch, notes).

    The function gets one sample at a time: batch is a `RolloutBatch` of one row, padded, so every tensor of tokens is
    (1, n), prompt included; reward and group are in it. notes are the sample's: a mapping with what the trainer noted,
    such as its advantage. It returns a number, a tensor of one element, or a loss of each token as (1, n) or (n,); the
    latter are added up.
    Raises InvalidField for a name that is no function, and for what the function raises or returns that is no loss; it
    names the sample then. Needs torch.
    """
    from ....producer.training.batch import RolloutBatch  # noqa: PLC0415 – torch

    function = user_function("--by", name)
    found: list[tuple[Recorded, npt.NDArray[np.float64]]] = []
    left_out: dict[str, int] = {}
    groups: dict[str, int] = {}
    for one in samples:
        group = groups.setdefault(one.result.group_id, len(groups))
        reward = one.notes.get("reward")
        reward = float(reward) if isinstance(reward, int | float) else math.nan
        try:
            # Workers do not send the prompt of a job of token ids back: the job has it.
            whole = one.result.model_copy(update={"prompt_ids": one.prompt_ids})
            batch = RolloutBatch.of([Row.of_result(whole, reward, group)])
        except InvalidField as error:  # of its prompt, or of its log-probabilities
            why = f"no {error.field}"
            left_out[why] = left_out.get(why, 0) + 1
            continue
        try:
            told = function(batch, dict(one.notes))
        except (Exception, SystemExit) as error:
            raise InvalidField("--by", name, f"a function that takes sample {one.name}: {error!r}") from error
        found.append((one, _numbers(told, batch, one, name)))
    total = sum(abs(float(losses.sum())) for _, losses in found)
    made = [_sample(one, losses, total) for one, losses in found]
    made.sort(key=lambda one: -abs(one.loss) if math.isfinite(one.loss) else -math.inf)
    return Losses(sum(one.loss for one in made), made, left_out)


def _numbers(told: Any, batch: RolloutBatch, one: Recorded, name: str) -> npt.NDArray[np.float64]:
    """(1,) or (n,): the losses that a function returned."""
    length = int(batch.lengths[0])
    try:
        if hasattr(told, "detach"):
            told = told.detach().cpu().double()
        losses = np.asarray(told, np.float64).reshape(-1)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidField("--by", name, f"a function that returns numbers; sample {one.name}: {error}") from error
    if losses.size not in (1, length):
        allowed = f"a function that returns one loss, or one for each of {length} tokens"
        raise InvalidField("--by", name, f"{allowed}; sample {one.name}: {losses.size}")
    return losses


def _sample(one: Recorded, losses: npt.NDArray[np.float64], total: float) -> SampleLoss:
    result, loss = one.result, float(losses.sum())
    share = abs(loss) / total if total else 0.0
    generated = losses[losses.size - len(result.token_ids) :] if losses.size > 1 else losses[:0]
    size = np.where(np.isfinite(generated), np.abs(generated), np.inf)
    versions = [span.version for span in one.spans() for _ in range(span.start, span.end)]
    places = [int(place) for place in np.argsort(-size, kind="stable")[:TOKENS] if size[place] > 0]
    ids = result.token_ids
    named = [TokenLoss(place, int(ids[place]), versions[place], float(generated[place])) for place in places]
    return SampleLoss(one.name, result.worker_id, result.versions, loss, share, named)
