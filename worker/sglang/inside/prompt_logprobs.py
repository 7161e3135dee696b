"""A prompt's logprobs after temperature in SGLang's scheduler process, for the requests that ask for them.

SGLang has one switch for all requests of a server. Two of its classes get a subclass: one carries a batch's sampling
parameters to where the prompt's logprobs are made, the other makes them.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import patches
from ..wire import KEY, SCALED, extras_of


def install() -> None:
    """Into this process, before a model is made."""
    metadata: Any = patches.original("layers.logits_processor:LogitsMetadata")
    input_logprobs: Any = patches.original("layers.logits_processor:InputLogprobProcessor")

    class Metadata(metadata):  # type: ignore[misc]
        """SGLang's `LogitsMetadata`, which also knows the batch's sampling parameters."""

        sampling: Any = None  # without an annotation of its own it would be a field; the class's is enough

        @classmethod
        def from_forward_batch(cls, forward_batch: Any) -> Any:
            made = super().from_forward_batch(forward_batch)
            made.sampling = forward_batch.sampling_info
            return made

    class InputLogprobs(input_logprobs):  # type: ignore[misc]
        """SGLang's `InputLogprobProcessor`, twice for a batch of which somebody wants logprobs after temperature."""

        def forward(self, **kwargs: Any) -> Any:
            plain, sampled = super().forward(**kwargs)
            divisors = _divisors(getattr(kwargs["logits_metadata"], "sampling", None))
            if divisors is None:
                return plain, sampled
            rows = kwargs["token_to_seq_idx"][: kwargs["pruned_states"].shape[0]]
            divided = _Divided(kwargs["get_logits_fn"], divisors[torch.tensor(rows, device=divisors.device)])
            # What the next tokens are drawn from has to stay as it is: only the logprobs are of the second time.
            after, _ = super().forward(**{**kwargs, "get_logits_fn": divided})
            return after, sampled

    patches.replace("layers.logits_processor:LogitsMetadata", Metadata)
    patches.replace("layers.logits_processor:InputLogprobProcessor", InputLogprobs)


class _Divided:
    """Logits of one chunk after the other, divided by a number for each row. divisors: (rows, 1)."""

    def __init__(self, original: Any, divisors: torch.Tensor) -> None:
        self._original, self._divisors, self._next = original, divisors, 0

    def __call__(self, states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        begin, self._next = self._next, self._next + states.shape[0]
        logits: torch.Tensor = self._original(states, *args, **kwargs)
        return logits.float() / self._divisors[begin : self._next]


def _divisors(sampling: Any) -> torch.Tensor | None:
    """(batch, 1): the temperature of rows that want their logprobs after it, 1 for others; None if nobody does."""
    if sampling is None or not sampling.has_custom_logit_processor:
        return None
    # SGLang puts in the request itself only where it names a processor: one with nothing but a stop has none.
    told = [
        KEY in each and "__req__" in each and bool(extras_of(each["__req__"]).get(SCALED))
        for each in map(_or_none, sampling.custom_params)
    ]
    if not any(told):
        return None
    temperatures: torch.Tensor = sampling.temperatures
    return torch.where(torch.tensor(told, device=temperatures.device)[:, None], temperatures, 1.0)


def _or_none(params: dict[str, Any] | None) -> dict[str, Any]:
    return params or {}
