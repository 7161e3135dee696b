"""A sampler in SGLang's scheduler process that acts on the extras of single requests.

SGLang lets us register a sampler for any name of a sampling backend (`register_sampler_backend`). This one is SGLang's,
with logit processors that know at which token they are, temperatures that change, and logprobs after temperature. A
batch in which no request has extras for it goes straight to SGLang's code.

The place in a sample is known from the positions of the batch's newest tokens, which SGLang hands to its sampler. The
requests themselves know less: with overlap scheduling they get their newest token one batch later.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from sglang.srt.layers import sampler as sampler_module

from ...logit_processors import LogitProcessor, Registry, Rows, tensor_on
from ..wire import ALL_STATES, GENERATED, KEY, PROCESSORS, SCALED, extras_of
from . import prompt_logprobs

logger = logging.getLogger(__name__)
BACKENDS = ("pytorch", "flashinfer", "ascend", "intel_xpu")
_ATTRIBUTE = "rolloutmq_told"


def install(server_args: Any, own: Mapping[str, str]) -> None:
    """Let SGLang make this sampler in this process. own: the operator's logit processors. Raises ConfigError."""
    registry = Registry(own)
    registry.load_own()
    for backend in {*BACKENDS, server_args.sampling_backend or BACKENDS[0]}:
        sampler_module.register_sampler_backend(backend, lambda: RequestSampler(registry))
    prompt_logprobs.install()


class RequestSampler(sampler_module.Sampler):  # type: ignore[misc]
    """SGLang's sampler, and what the extras of requests ask for."""

    def __init__(self, registry: Registry) -> None:
        super().__init__()
        self._registry = registry
        self._plan: Plan | None = None  # of the last batch, as long as it is valid
        self._step: _Step | None = None
        original: Any = self.output_logprob_processor
        self.output_logprob_processor: Any = _OutputLogprobs(original, lambda: self._step)

    def forward(self, logits_output: Any, sampling_info: Any, *args: Any, **kwargs: Any) -> Any:
        """See SGLang's. The positions of the newest tokens are its last positional argument."""
        if not sampling_info.has_custom_logit_processor:
            self._plan = None  # none of its requests is there any more
            return super().forward(logits_output, sampling_info, *args, **kwargs)
        positions = kwargs["positions"] if "positions" in kwargs else args[3]
        given = sampling_info.temperatures
        plan = self._planned(sampling_info.custom_params, positions.device)
        lost = torch.zeros(len(given), dtype=torch.bool, device=given.device)
        sampling_info.temperatures = plan.temperatures(given, positions, lost)
        self._step = _Step(plan, positions, sampling_info.temperatures, lost)
        try:
            tokens = super().forward(logits_output, sampling_info, *args, **kwargs)
        finally:
            sampling_info.temperatures, self._step = given, None
        plan.sampled(tokens)
        return tokens

    def _planned(self, params: list[dict[str, Any] | None], device: torch.device) -> Plan:
        """Return the plan of a batch. params: SGLang's own of each row, into which it puts the request."""
        members = [
            (row, _told(each["__req__"], self._registry))
            for row, each in enumerate(params)
            if each is not None and KEY in each and "__req__" in each
        ]
        if self._plan is None or self._plan.members != members:
            self._plan = Plan(members, device)
        return self._plan

    def _preprocess_logits(self, logits: Any, sampling_info: Any) -> Any:
        step = self._step
        if step is None:
            return super()._preprocess_logits(logits, sampling_info)
        step.plan.change(logits, step.positions, step.lost)
        sampling_info.has_custom_logit_processor = False  # SGLang's own code for it would only copy rows
        try:
            return super()._preprocess_logits(logits, sampling_info)
        finally:
            sampling_info.has_custom_logit_processor = True

    def _sample_from_probs(self, probs: Any, sampling_info: Any, positions: Any, *args: Any, **kwargs: Any) -> Any:
        """Draw by seeds. The draw depends only on the row's own distribution, seed and position.

        If one request of the batch truncates its probabilities, SGLang draws from all rows in order of size, else in
        the vocabulary's order. So with SGLang's own code the hash belongs to another token from batch to batch.
        """
        seeds = sampling_info.sampling_seed
        if seeds is None or getattr(sampling_info, "sampling_mask_batch_indices", None) is not None:
            return super()._sample_from_probs(probs, sampling_info, positions, *args, **kwargs)
        probs = truncated(probs, sampling_info.top_ks, sampling_info.top_ps)
        drawn = sampler_module.multinomial_with_seed(probs.double().log_(), seeds, positions)
        tokens = drawn.view(-1).to(torch.int32)
        return (tokens, None) if hasattr(sampler_module, "_SamplingMaskCapture") else tokens


def truncated(probs: torch.Tensor, top_ks: torch.Tensor, top_ps: torch.Tensor) -> torch.Tensor:
    """Return (batch, vocabulary) in the vocabulary's order, with 0 for tokens that top-k or top-p of the row exclude.

    As in SGLang both use the same probabilities, and the token that reaches top_p is included.
    """
    ordered, index = probs.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(probs.shape[-1], device=probs.device)[None, :]
    out = ranks >= top_ks[:, None]
    # top_p=1 must exclude nothing, but by rounding the sum can exceed 1.
    out |= (ordered.cumsum(-1) - ordered > top_ps[:, None]) & (top_ps[:, None] < 1.0)
    return torch.empty_like(probs).scatter_(-1, index, ordered.masked_fill_(out, 0.0))


class _Step(NamedTuple):
    """One batch on its way through the sampler."""

    plan: Plan
    positions: Any
    temperatures: Any
    lost: Any


class _OutputLogprobs:
    """SGLang's `OutputLogprobProcessor` with other logprobs for some rows."""

    def __init__(self, original: Any, step: Callable[[], _Step | None]) -> None:
        self._original, self._step = original, step

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def compute_logprobs(self, logprobs: Any, *args: Any, **kwargs: Any) -> Any:
        """logprobs: (batch, vocabulary), before temperature. It may be written to, as SGLang does."""
        step = self._step()
        if step is not None and (scaled := step.plan.scaled) is not None:
            # A log-softmax differs from the logits by one number per row. So dividing it instead of the logits is
            # exact.
            after = torch.log_softmax(logprobs[scaled] / step.temperatures[scaled], dim=-1)
            logprobs.index_copy_(0, scaled, after)
        result = self._original.compute_logprobs(logprobs, *args, **kwargs)
        if (values := result.token_ids_logprobs_val) is not None:
            # 0.5.17 puts a list where a row asked for none, and later calls a tensor's method on it.
            result.token_ids_logprobs_val = [v if torch.is_tensor(v) else logprobs.new_empty(0) for v in values]
        if step is not None and step.plan.guarded is not None:
            result.token_logprobs = result.token_logprobs.masked_fill(step.lost, float("nan"))
        return result


# --- the rows of a batch ----------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Told:
    """One request of SGLang's (`Req`) and what it asked for. It lives as long as the request.

    prompt_len: number of tokens of the sample's prompt, without those that earlier legs generated. SGLang's prompt has
    both. last: the newest tokens of the batch that it was in last, and its row there. SGLang hands out a token one
    batch late.
    """

    prompt_len: int
    processors: list[tuple[LogitProcessor, Mapping[str, Any]]]
    scaled: bool
    req: Any  # 0.5.17: itself, which makes a cycle that the collector finds; later a weak reference
    kept: dict[int, Any] = field(default_factory=dict)
    last: tuple[torch.Tensor, int] | None = None
    failed: bool = False  # one of its processors did, which has been logged

    def prompt_ids(self) -> list[int]:
        """The prompt of the sample."""
        return list(self.req.origin_input_ids[: self.prompt_len])

    def generated_ids(self, count: int) -> list[int]:
        """Return the first `count` tokens of the sample. Raises RuntimeError if one of them is not known."""
        known = [*self.req.origin_input_ids[self.prompt_len :], *self.req.output_ids][:count]
        if len(known) == count - 1 and self.last is not None:
            tokens, row = self.last
            known.append(int(tokens[row]))
        if len(known) != count:
            raise RuntimeError(f"request {self.req.rid}: {len(known)} of {count} tokens are known")
        return known


def _told(req: Any, registry: Registry) -> Told:
    found: Told | None = getattr(req, _ATTRIBUTE, None)
    if found is None:
        extras = extras_of(req)
        processors = [(registry.get(name), params) for name, params in extras.get(PROCESSORS, ())]
        prompt_len = max(0, len(req.origin_input_ids) - int(extras.get(GENERATED, 0)))
        found = Told(prompt_len, processors, bool(extras.get(SCALED)), req)
        setattr(req, _ATTRIBUTE, found)
        if extras.get(ALL_STATES):
            # The request asks SGLang for "last", so that it keeps no states of the prompt. They are collected per pass.
            req.return_hidden_states = True
    return found


class _Group:
    """Rows of one batch that have the same processor at the same place in their order."""

    def __init__(self, processor: LogitProcessor, members: list[tuple[int, int, Told]], device: torch.device) -> None:
        """members: (row of the batch, place in the job's list, request)."""
        self.processor = processor
        self.members = members
        self.told = [told for _, _, told in members]
        self.places = [place for _, place, _ in members]
        self.params = [told.processors[place][1] for _, place, told in members]
        self.index = tensor_on(device, [row for row, _, _ in members])
        self.prompts = tensor_on(device, [told.prompt_len for told in self.told])
        self.shared: dict[str, Any] = {}

    def rows(self, positions: torch.Tensor) -> Rows:
        # The newest token is at `positions`. Clamped, because a prompt may be prefilled in chunks.
        generated = (positions[self.index] + 1 - self.prompts).clamp_(min=0)
        return Rows(self.params, generated, self.told, self.places, self.shared)

    def alone(self) -> list[_Group]:
        """Return a group for each row."""
        return [_Group(self.processor, [member], self.index.device) for member in self.members]

    def log_failure(self) -> None:
        """Log the failure of its one row, once and not for each of its further tokens."""
        if not self.told[0].failed:
            self.told[0].failed = True
            logger.exception("logit processor %s failed", type(self.processor).__name__)


class Plan:
    """What is done to a batch. It is valid as long as the same requests are in the same rows."""

    def __init__(self, members: list[tuple[int, Told]], device: torch.device) -> None:
        self.members = members
        self.scaled = _index([row for row, told in members if told.scaled], device)
        guarded = [row for row, told in members if told.processors]
        self.guarded = _index(guarded, device)
        self.groups: list[_Group] = []
        for place in range(max((len(told.processors) for _, told in members), default=0)):
            stage: dict[LogitProcessor, list[tuple[int, int, Told]]] = {}
            for row, told in members:
                if place < len(told.processors):
                    stage.setdefault(told.processors[place][0], []).append((row, place, told))
            self.groups += [_Group(processor, found, device) for processor, found in stage.items()]

    def temperatures(self, given: torch.Tensor, positions: torch.Tensor, lost: torch.Tensor) -> torch.Tensor:
        """Return (batch, 1): the temperatures `given`, or those that processors set. lost: as in `change`."""
        waiting = [g for g in self.groups if type(g.processor).temperature is not LogitProcessor.temperature]
        while waiting:
            group = waiting.pop(0)
            try:
                found = group.processor.temperature(group.rows(positions))
            except Exception:
                if len(group.members) > 1:  # each row by itself shows which one fails
                    waiting[:0] = group.alone()
                    continue
                group.log_failure()
                found = given.new_full((1,), float("nan"))
            if found is not None:
                bad = ~((found > 0) & torch.isfinite(found))
                lost[group.index] |= bad
                given = given.index_copy(0, group.index, found.masked_fill(bad, 1.0).to(given)[:, None])
        return given

    def change(self, logits: torch.Tensor, positions: torch.Tensor, lost: torch.Tensor) -> None:
        """Run the processors on `logits` (batch, vocabulary), in place.

        lost: (batch,) bool. It is set for a row that has no token left, or whose processor failed. Such a row gets a
        uniform distribution, because SGLang's sampler ends the whole engine if a row is no distribution.
        """
        waiting = [g for g in self.groups if type(g.processor).__call__ is not LogitProcessor.__call__]
        while waiting:
            group = waiting.pop(0)
            selected = logits.index_select(0, group.index)
            try:
                group.processor(selected, group.rows(positions))
            except Exception:
                if len(group.members) > 1:
                    waiting[:0] = group.alone()
                    continue
                group.log_failure()
                selected.fill_(float("nan"))
            logits.index_copy_(0, group.index, selected)
        if self.guarded is not None:
            selected = logits.index_select(0, self.guarded)
            lost[self.guarded] |= ~torch.isfinite(selected.amax(-1))  # NaN if the row has one
            logits.index_copy_(0, self.guarded, selected.masked_fill_(lost[self.guarded][:, None], 0.0))

    def sampled(self, tokens: torch.Tensor) -> None:
        """Take the batch's next tokens."""
        for row, told in self.members:
            told.last = tokens, row


def _index(rows: list[int], device: torch.device) -> torch.Tensor | None:
    return tensor_on(device, rows) if rows else None
