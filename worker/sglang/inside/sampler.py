"""Inside SGLang's scheduler process: a sampler that hears what single requests told it.

SGLang lets any name of a sampling backend be given a sampler of one's own (`register_sampler_backend`); this one is
SGLang's, with logit processors that know at which token they are, temperatures that change, and logprobs after
temperature for those who want them. A batch in which nobody told anything goes straight to SGLang's.

Where it knows the place in a sample from: the positions of the batch's newest tokens, which SGLang's sampler is given.
The requests themselves know less, because with overlap scheduling their newest token is handed out one batch later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from sglang.srt.layers import logits_processor as logits_module
from sglang.srt.layers import sampler as sampler_module

from ...logit_processors import Registry
from . import prompt_logprobs as sglang_prompt_logprobs
from .sampler_rows import Plan, Planner

BACKENDS = ("pytorch", "flashinfer", "ascend", "intel_xpu")


def install(server_args: Any, own: Mapping[str, str]) -> None:
    """Have SGLang make this sampler in this process. own: the operator's logit processors. Raises ConfigError."""
    registry = Registry(own)
    registry.load_own()
    for backend in {*BACKENDS, server_args.sampling_backend or BACKENDS[0]}:
        sampler_module.register_sampler_backend(backend, lambda: RequestSampler(registry))
    sglang_prompt_logprobs.install(logits_module)


class RequestSampler(sampler_module.Sampler):  # type: ignore[misc]
    """SGLang's sampler, and what requests told it."""

    def __init__(self, registry: Registry) -> None:
        super().__init__()
        self._planner = Planner(registry)
        self._step: _Step | None = None
        original: Any = self.output_logprob_processor
        self.output_logprob_processor: Any = _OutputLogprobs(original, lambda: self._step)

    def forward(self, logits_output: Any, sampling_info: Any, *args: Any, **kwargs: Any) -> Any:
        """See SGLang's. The positions of the newest tokens are its last positional argument."""
        if not sampling_info.has_custom_logit_processor:
            self._planner.forget()
            return super().forward(logits_output, sampling_info, *args, **kwargs)
        positions = kwargs["positions"] if "positions" in kwargs else args[3]
        given = sampling_info.temperatures
        plan = self._planner.plan(sampling_info.custom_params, positions.device)
        lost = torch.zeros(len(given), dtype=torch.bool, device=given.device)
        sampling_info.temperatures = plan.temperatures(given, positions, lost)
        self._step = _Step(plan, positions, sampling_info.temperatures, lost)
        try:
            tokens = super().forward(logits_output, sampling_info, *args, **kwargs)
        finally:
            sampling_info.temperatures, self._step = given, None
        plan.sampled(tokens)
        return tokens

    def _preprocess_logits(self, logits: Any, sampling_info: Any) -> Any:
        step = self._step
        if step is None:
            return super()._preprocess_logits(logits, sampling_info)
        step.plan.change(logits, step.positions, step.lost)
        sampling_info.has_custom_logit_processor = False  # SGLang's own way would only copy the rows to and fro
        try:
            return super()._preprocess_logits(logits, sampling_info)
        finally:
            sampling_info.has_custom_logit_processor = True

    def _sample_from_probs(self, probs: Any, sampling_info: Any, positions: Any, *args: Any, **kwargs: Any) -> Any:
        """With seeds: a draw that depends on nothing but the row's own distribution, seed and position.

        SGLang's draws from the probabilities in order of size as soon as one request of the batch truncates them, and
        in the vocabulary's order otherwise: the hash then belongs to another token.
        """
        seeds = sampling_info.sampling_seed
        if seeds is None or getattr(sampling_info, "sampling_mask_batch_indices", None) is not None:
            return super()._sample_from_probs(probs, sampling_info, positions, *args, **kwargs)
        probs = truncated(probs, sampling_info.top_ks, sampling_info.top_ps)
        drawn = sampler_module.multinomial_with_seed(probs.double().log_(), seeds, positions)
        tokens = drawn.view(-1).to(torch.int32)
        return (tokens, None) if hasattr(sampler_module, "_SamplingMaskCapture") else tokens


def truncated(probs: torch.Tensor, top_ks: torch.Tensor, top_ps: torch.Tensor) -> torch.Tensor:
    """(batch, vocabulary) in the vocabulary's order, 0 where top-k or top-p of the row leave a token out.

    As SGLang has it: both look at the same probabilities, and the token that reaches top_p is in.
    """
    ordered, index = probs.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(probs.shape[-1], device=probs.device)[None, :]
    out = ranks >= top_ks[:, None]
    # A row without top-p is not touched by it: its sum can come out above 1.
    out |= (ordered.cumsum(-1) - ordered > top_ps[:, None]) & (top_ps[:, None] < 1.0)
    return torch.empty_like(probs).scatter_(-1, index, ordered.masked_fill_(out, 0.0))


class _Step:
    """One batch on its way through the sampler."""

    def __init__(self, plan: Plan, positions: Any, temperatures: Any, lost: Any) -> None:
        self.plan, self.positions, self.temperatures, self.lost = plan, positions, temperatures, lost


class _OutputLogprobs:
    """SGLang's `OutputLogprobProcessor`, and after it what is different for some rows."""

    def __init__(self, original: Any, step: Callable[[], _Step | None]) -> None:
        self._original, self._step = original, step

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def compute_logprobs(self, logprobs: Any, *args: Any, **kwargs: Any) -> Any:
        """logprobs: (batch, vocabulary), before temperature; a tensor of its own, which SGLang also writes to."""
        step = self._step()
        if step is not None and (scaled := step.plan.scaled) is not None:
            # A log-softmax differs from the logits by one number in each row: dividing it instead is exact.
            after = torch.log_softmax(logprobs[scaled] / step.temperatures[scaled], dim=-1)
            logprobs.index_copy_(0, scaled, after)
        result = self._original.compute_logprobs(logprobs, *args, **kwargs)
        if (values := result.token_ids_logprobs_val) is not None:
            # 0.5.17 puts a list where a row asked for none, and later calls a tensor's method on it.
            result.token_ids_logprobs_val = [v if torch.is_tensor(v) else logprobs.new_empty(0) for v in values]
        if step is not None and step.plan.guarded is not None:
            result.token_logprobs = result.token_logprobs.masked_fill(step.lost, float("nan"))
        return result
