"""Penalties and minimum lengths in SGLang's scheduler process, for a whole sample and not for one leg.

SGLang's penalizers begin every request with no tokens, a retracted one too. These begin with the tokens that earlier
legs generated (in the request's prompt) and that the request has generated itself. With overlap scheduling SGLang's
penalizers get each token one batch late, and the prompt's last one first. These read the tokens on the device, where
the next forward pass takes them from. Without overlap scheduling SGLang applies several penalties in the order of a
set. These have one order. SGLang compiles a function at its first use, while all that runs waits. This does not. A
batch without penalties runs none of this.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sglang.srt.sampling import penaltylib

from .. import patches
from ..wire import LEAST, extras_of, generated_before
from .scheduler import current

NEVER = -1e9
"""It is added to a logit. The probability is then 0 in float32, unless a grammar allows nothing else."""


def install() -> None:
    """Let SGLang make these penalizers in this process."""
    for kind, own in (
        ("Frequency", Frequency),
        ("Presence", Presence),
        ("Repetition", Repetition),
        ("MinNewTokens", LeastTokens),
    ):
        patches.replace(f"sampling.penaltylib:Batched{kind}Penalizer", own)
    for module in ("penaltylib.repetition_penalty", "sampling_batch_info"):
        scale = patches.original(f"sampling.{module}:apply_scaling_penalties")
        patches.replace(f"sampling.{module}:apply_scaling_penalties", patches.uncompiled(scale))
    make = patches.original("sampling.penaltylib:BatchedPenalizerOrchestrator.__init__")
    cumulated = patches.original("managers.schedule_batch:ScheduleBatch.cumulate_penalty_output_tokens")

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        # Penalties that are subtracted come before the one that scales, as with overlap scheduling, and by name: SGLang
        # has them in a set of classes, whose order differs between processes, and another order rounds differently.
        self.penalizers = dict(
            sorted(self.penalizers.items(), key=lambda item: (item[1].is_multiplicative, item[0].__name__))
        )

    def cumulate(self: Any) -> None:
        if self.enable_overlap:
            self.sampling_info.penalizer_orchestrator.cumulate_output_tokens(_newest_tokens(self))
        else:
            cumulated(self)

    patches.replace("sampling.penaltylib:BatchedPenalizerOrchestrator.__init__", init)
    patches.replace("managers.schedule_batch:ScheduleBatch.cumulate_penalty_output_tokens", cumulate)


def _newest_tokens(batch: Any) -> torch.Tensor:
    """Return (batch,) int64: the tokens that the next forward pass reads.

    They are ready when the pass before has run.
    """
    scheduler = current()
    if torch.device(batch.device).type != "cpu":
        torch.get_device_module(batch.device).current_stream().wait_stream(scheduler.forward_stream)
    return scheduler.future_map.output_tokens_buf[batch.req_pool_indices].to(torch.int64)


def _tokens_of(req: Any) -> list[int]:
    return [*generated_before(req), *req.output_ids]


class Frequency(penaltylib.BatchedFrequencyPenalizer):  # type: ignore[misc]
    """Subtracts the penalty for every time the sample has the token."""

    def _prepare(self) -> None:
        super()._prepare()
        for row, req in enumerate(self.orchestrator.reqs()):
            penalty = req.sampling_params.frequency_penalty
            if penalty != 0.0 and (tokens := _tokens_of(req)):
                distinct, counts = torch.tensor(tokens).unique(return_counts=True)
                # Summed up one by one, as SGLang does it. A product would be rounded otherwise.
                sums = np.cumsum(np.full(int(counts.max()), penalty, np.float32))
                added = torch.from_numpy(sums[counts.numpy() - 1]).to(self.orchestrator.device)
                self.cumulated_frequency_penalties[row, distinct] = added


class Presence(penaltylib.BatchedPresencePenalizer):  # type: ignore[misc]
    """Subtracts the penalty if the sample has the token."""

    def _prepare(self) -> None:
        super()._prepare()
        for row, req in enumerate(self.orchestrator.reqs()):
            penalty = req.sampling_params.presence_penalty
            if penalty != 0.0 and (tokens := _tokens_of(req)):
                self.cumulated_presence_penalties[row, torch.tensor(tokens)] = penalty


class Repetition(penaltylib.BatchedRepetitionPenalizer):  # type: ignore[misc]
    """Divides a positive logit by the penalty, and multiplies a negative one, if the sample has the token."""

    def _prepare(self) -> None:
        super()._prepare()
        for row, req in enumerate(self.orchestrator.reqs()):
            penalty = req.sampling_params.repetition_penalty
            if penalty != 1.0 and (tokens := _tokens_of(req)):
                self.cumulated_repetition_penalties[row, torch.tensor(tokens)] = penalty


class LeastTokens(penaltylib.BatchedMinNewTokensPenalizer):  # type: ignore[misc]
    """Forbids tokens that would end the sample before its minimum length. The others keep their relative probabilities.

    Tokens are counted batch by batch. So it does not matter when SGLang hands them out.
    """

    def _is_required(self) -> bool:
        return any(LEAST in extras_of(req) for req in self.orchestrator.reqs())

    def _prepare(self) -> None:
        reqs, device = self.orchestrator.reqs(), self.orchestrator.device
        least = [extras_of(req).get(LEAST, 0) for req in reqs]
        counts = [len(_tokens_of(req)) if wanted else 0 for req, wanted in zip(reqs, least, strict=True)]
        ends = torch.zeros((len(reqs), self.orchestrator.vocab_size), dtype=torch.float32)
        for row, req in enumerate(reqs):
            if least[row]:
                ends[row, sorted(_ending(req, self.orchestrator.vocab_size))] = NEVER
        self.min_new_tokens = torch.tensor(least, dtype=torch.int32).unsqueeze_(1).to(device)
        self.len_output_tokens = torch.tensor(counts, dtype=torch.int32).unsqueeze_(1).to(device)
        self.stop_token_penalties = ends.to(device)


def _ending(req: Any, vocab_size: int) -> set[int]:
    tokens = set(req.sampling_params.stop_token_ids or ())
    if not req.sampling_params.ignore_eos:
        tokens |= set(req.eos_token_ids or ())
    return {token for token in tokens if token is not None and 0 <= token < vocab_size}
