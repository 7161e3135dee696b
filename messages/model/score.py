"""How likely a model finds given continuations of a prompt."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from .base import Floats, TokenIds
from .chat import MAX_TEXT
from .embed import Inputs, Texts
from .tasks import Conversation, TaskJob, TaskResult


class ScoreJob(TaskJob):
    """The log-probability of each continuation of one prompt, under the model's own distribution.

    token_ids, text or messages: the prompt, as in GenerateJob. continuations: ids, or `texts`, tokenised by themselves
    without special tokens and set behind the prompt's ids: so what is scored is exactly these tokens.
    """

    KIND: ClassVar[int] = 36
    task: ClassVar[Literal["embed", "reward", "score"]] = "score"

    token_ids: TokenIds | None = None
    text: Annotated[str, Field(min_length=1, max_length=MAX_TEXT)] | None = None
    messages: Conversation | None = None
    continuations: Inputs | None = None
    texts: Texts | None = None

    @property
    def n(self) -> int:
        """See TaskJob."""
        return len(self.continuations or self.texts or ())

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        for names in (("token_ids", "text", "messages"), ("continuations", "texts")):
            given = [name for name in names if getattr(self, name) is not None]
            if len(given) != 1:
                raise ValueError(f"exactly one of {', '.join(names)} is required, got {given or 'none'}")
        if self.token_ids is not None and self.token_ids.size == 0:
            raise ValueError("token_ids: at least one prompt token is required")
        for place, ids in enumerate(self.continuations or ()):
            if ids.size == 0:
                raise ValueError(f"continuations[{place}]: at least one token is required")
        return self


class ScoreResult(TaskResult):
    """logprobs: (t,) float32, natural log of the probability of each token of the continuation given all before it,
    before any temperature. token_ids: (t,) int32, what the texts of a job became, else None."""

    KIND: ClassVar[int] = 37

    logprobs: Floats
    token_ids: TokenIds | None = None

    @property
    def sum(self) -> float:
        """Log-probability of the continuation; added up in float64."""
        return float(np.sum(self.logprobs, dtype=np.float64))

    @property
    def mean(self) -> float:
        """Log-probability per token."""
        return self.sum / self.logprobs.size
