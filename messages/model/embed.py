"""Embeddings and rewards: what a model that pools says about whole inputs."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from .base import Floats, TokenIds
from .chat import MAX_TEXT
from .tasks import Conversation, TaskJob, TaskResult

Texts = Annotated[tuple[Annotated[str, Field(min_length=1, max_length=MAX_TEXT)], ...], Field(min_length=1)]
Inputs = Annotated[tuple[TokenIds, ...], Field(min_length=1)]


class PoolingJob(TaskJob):
    """Inputs, in exactly one form: ids, texts as the model's tokenizer reads them, or conversations.

    Conversations are rendered by the model's chat template, without the beginning of an answer.
    """

    token_ids: Inputs | None = None
    texts: Texts | None = None
    conversations: Annotated[tuple[Conversation, ...], Field(min_length=1)] | None = None

    @property
    def n(self) -> int:
        """See TaskJob."""
        return len(self.token_ids or self.texts or self.conversations or ())

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        given = [name for name in ("token_ids", "texts", "conversations") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"exactly one of token_ids, texts and conversations is required, got {given or 'none'}")
        for place, ids in enumerate(self.token_ids or ()):
            if ids.size == 0:
                raise ValueError(f"token_ids[{place}]: at least one token is required")
        return self


class EmbedJob(PoolingJob):
    """An embedding of each input.

    dimensions: keep so many of the first components (of a model trained for it: Matryoshka); None keeps all. More than
        the model has is refused.
    normalize: to length 1, after cutting. False leaves what the model's own pooling gives, and many of SGLang's
        embedding models normalise by themselves.
    """

    KIND: ClassVar[int] = 32
    task: ClassVar[Literal["embed", "reward", "score"]] = "embed"

    dimensions: int | None = Field(default=None, ge=1, le=1 << 16)
    normalize: bool = True


class EmbedResult(TaskResult):
    """embedding: (d,) float32."""

    KIND: ClassVar[int] = 33

    embedding: Floats


class RewardJob(PoolingJob):
    """A reward model's score of each input: prompt and response as one sequence, or as a conversation."""

    KIND: ClassVar[int] = 34
    task: ClassVar[Literal["embed", "reward", "score"]] = "reward"


class RewardResult(TaskResult):
    """scores: (k,) float32, one for each of the model's labels, no activation applied."""

    KIND: ClassVar[int] = 35

    scores: Floats

    @property
    def score(self) -> float:
        """The score of a model that gives one: the first."""
        return float(self.scores[0])
