"""A prompt's logprobs after temperature in SGLang's scheduler process, for the requests that ask for them.

SGLang has one switch for all requests of a server. So two of its classes get a subclass. One carries a batch's sampling
parameters to the code that makes the prompt's logprobs, and the other is that code.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import patches
from ..wire import KEY, SCALED, extras_of


def install() -> None:
    """Let SGLang use both subclasses in this process. Call it before a model is made."""
    metadata: Any = patches.original("layers.logits_processor:LogitsMetadata")
    input_logprobs: Any = patches.original("layers.logits_processor:InputLogprobProcessor")

    class Metadata(metadata):  # type: ignore[misc]
        """SGLang's `LogitsMetadata` with the batch's sampling parameters."""

        sampling: Any = None

        @classmethod
        def from_forward_batch(cls, forward_batch: Any) -> Any:
            made = super().from_forward_batch(forward_batch)
            made.sampling = forward_batch.sampling_info
            return made

    class InputLogprobs(input_logprobs):  # type: ignore[misc]
        """SGLang's `InputLogprobProcessor`.

        It runs twice for a batch in which a request wants logprobs after temperature.
        """

        def forward(self, **kwargs: Any) -> Any:
            plain, sampled = super().forward(**kwargs)
            divisors = _divisors(getattr(kwargs["logits_metadata"], "sampling", None))
            if divisors is None:
                return plain, sampled
            rows = kwargs["token_to_seq_idx"][: kwargs["pruned_states"].shape[0]]
            divided = _divided(kwargs["get_logits_fn"], divisors[torch.tensor(rows, device=divisors.device)])
            # Only the logprobs are taken from the second run. The distribution of the next tokens must stay as it is.
            after, _ = super().forward(**{**kwargs, "get_logits_fn": divided})
            return after, sampled

    patches.replace("layers.logits_processor:LogitsMetadata", Metadata)
    patches.replace("layers.logits_processor:InputLogprobProcessor", InputLogprobs)


def _divided(original: Any, divisors: torch.Tensor) -> Any:
    """Return what makes logits chunk by chunk, as `original`, and divides each row by a number. divisors: (rows, 1)."""
    done = 0

    def divided(states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        nonlocal done
        begin, done = done, done + states.shape[0]
        logits: torch.Tensor = original(states, *args, **kwargs)
        return logits.float() / divisors[begin:done]

    return divided


def _divisors(sampling: Any) -> torch.Tensor | None:
    """Return (batch, 1): the temperature of rows that want logprobs after it, and 1 for others. None if none does."""
    if sampling is None or not sampling.has_custom_logit_processor:
        return None
    # SGLang only adds the request itself if it names a processor. One that only has a stop does not.
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
