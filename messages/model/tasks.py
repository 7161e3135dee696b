"""Jobs that generate nothing. Each input is one sample, so all guarantees of the queue hold for them too."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, StrictInt, model_validator

from ..shown import short_id, shown
from .base import (
    MAX_METADATA_ITEMS,
    Float,
    Floats,
    Int,
    Items,
    Message,
    Metadata,
    Submitted,
    TokenIds,
    exactly_one,
)
from .chat import MAX_TEXT, ChatMessage
from .jobs import EXACT, MAX_SAMPLES, Priority, check_exact
from .results import Timings

Conversation = Annotated[Items[ChatMessage], Field(min_length=1, max_length=4096)]


class TaskJob(Submitted):
    """Base of these jobs. GenerateJob documents the fields.

    task: the kind of worker that can do it: EngineInfo.features has "task:<task>".
    n: the number of inputs. It is counted, not given.
    """

    task: ClassVar[Literal["embed", "reward", "score"]]

    id: str = ""
    reply_to: str = Field(default="", max_length=128)
    group_id: str = Field(default="", max_length=128)
    priority: Priority = "normal"
    deadline_s: Float | None = Field(default=None, gt=0, le=30 * 86400.0)
    min_version: Int = Field(default=0, ge=0)
    exact_version: Int | None = Field(default=None, ge=0, lt=1 << 40)
    max_staleness: Int | None = Field(default=None, ge=0)
    trace_id: str | None = Field(default=None, max_length=64)
    metadata: Metadata = Field(default_factory=dict, max_length=MAX_METADATA_ITEMS)

    lora: ClassVar[None] = None
    min_adapter_version: ClassVar[int] = 0

    @model_validator(mode="after")
    def _not_too_many(self) -> Self:
        if self.exact_version is not None:
            check_exact(self.exact_version, self.min_version, self.max_staleness)
        if not 1 <= self.n <= MAX_SAMPLES:
            raise ValueError(f"{self.n} inputs: from 1 to {MAX_SAMPLES} in one job")
        return self

    @property
    def n(self) -> int:
        """The number of inputs. Each is one sample with one result."""
        raise NotImplementedError

    @property
    def group(self) -> str:
        """The group this job belongs to."""
        return self.group_id or self.id

    def features_used(self) -> list[str]:
        """Names of the features that this job needs, as in GenerateJob."""
        return [f"task:{self.task}", *([EXACT] if self.exact_version is not None else [])]

    def unsupported(self, features: frozenset[str]) -> list[str]:
        """Names of those that an engine with `features` does not have."""
        return [name for name in self.features_used() if name not in features]

    def value_of(self, name: str) -> Any:
        """The text that an error about feature `name` shows."""
        return self.exact_version if name == EXACT else f"{type(self).__name__} of {self.n}"


class TaskResult(Message):
    """The result of one input of a TaskJob.

    sample: the input's number. n: the number of the job's inputs.
    version: the weights version that computed the whole result.
    tokens: the length of the input. The other fields are as in RolloutResult.
    """

    ok: ClassVar[bool] = True

    job_id: str
    sample: StrictInt = Field(ge=0)
    n: StrictInt = Field(ge=1)
    group_id: str
    version: StrictInt = Field(ge=0)
    tokens: StrictInt = Field(ge=0)
    worker_id: str
    attempt: StrictInt = Field(ge=1)
    timings: Timings = Timings()
    fingerprint: dict[str, str] = Field(default_factory=dict, max_length=32)
    metadata: Metadata = Field(default_factory=dict)
    trace_id: str | None = None

    def __repr__(self) -> str:
        """One line: of arrays their shapes."""
        place = f"{short_id(self.job_id)} input {self.sample} of {self.n}: {self.tokens:,} tokens"
        arrays = [f"{name} {value.shape}" for name, value in self if isinstance(value, np.ndarray)]
        return shown(self, place, *arrays, f"version {self.version}")

    __str__ = __repr__


Texts = Annotated[Items[Annotated[str, Field(min_length=1, max_length=MAX_TEXT)]], Field(min_length=1)]
Inputs = Annotated[Items[TokenIds], Field(min_length=1)]


def _none_empty(name: str, inputs: tuple[TokenIds, ...] | None) -> None:
    for place, ids in enumerate(inputs or ()):
        if ids.size == 0:
            raise ValueError(f"{name}[{place}]: at least one token is required")


class PoolingJob(TaskJob):
    """Inputs in exactly one form: token ids, texts or conversations.

    The model's tokenizer reads the texts. Its chat template renders the conversations, without a generation prompt.
    """

    token_ids: Inputs | None = None
    texts: Texts | None = None
    conversations: Annotated[Items[Conversation], Field(min_length=1)] | None = None

    @property
    def n(self) -> int:
        return len(self.token_ids or self.texts or self.conversations or ())

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        exactly_one(self, "token_ids", "texts", "conversations")
        _none_empty("token_ids", self.token_ids)
        return self


class EmbedJob(PoolingJob):
    """Asks for an embedding of each input.

    dimensions: how many of the first components to keep, for a model trained for it (Matryoshka). None keeps all. The
        worker refuses more than the model has.
    normalize: scale to length 1, after cutting. False returns the output of the model's own pooling, and many of
        SGLang's embedding models normalise there.
    """

    KIND: ClassVar[int] = 32
    task: ClassVar[Literal["embed", "reward", "score"]] = "embed"

    dimensions: Int | None = Field(default=None, ge=1, le=1 << 16)
    normalize: bool = True


class EmbedResult(TaskResult):
    """embedding: (d,) float32."""

    KIND: ClassVar[int] = 33

    embedding: Floats


class RewardJob(PoolingJob):
    """Asks for a reward model's score of each input: prompt and response as one sequence, or a conversation."""

    KIND: ClassVar[int] = 34
    task: ClassVar[Literal["embed", "reward", "score"]] = "reward"


class RewardResult(TaskResult):
    """scores: (k,) float32, one for each of the model's labels, without an activation."""

    KIND: ClassVar[int] = 35

    scores: Floats

    @property
    def score(self) -> float:
        """The first score, the only one of most reward models."""
        return float(self.scores[0])


class ScoreJob(TaskJob):
    """Asks for the log-probability of each continuation of one prompt, under the model's own distribution.

    token_ids, text or messages: the prompt, as in GenerateJob.
    continuations or texts: token ids, or texts that are tokenised by themselves without special tokens. Their ids
        follow the prompt's ids, so exactly these tokens are scored.
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
        return len(self.continuations or self.texts or ())

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        exactly_one(self, "token_ids", "text", "messages")
        exactly_one(self, "continuations", "texts")
        if self.token_ids is not None and self.token_ids.size == 0:
            raise ValueError("token_ids: at least one prompt token is required")
        _none_empty("continuations", self.continuations)
        return self


class ScoreResult(TaskResult):
    """logprobs: (t,) float32, natural log-probability of each token of the continuation given all tokens before it,
    without temperature. token_ids: (t,) int32, the tokens of a continuation that was given as text, else None."""

    KIND: ClassVar[int] = 37

    logprobs: Floats
    token_ids: TokenIds | None = None

    @property
    def sum(self) -> float:
        """Log-probability of the continuation, summed in float64."""
        return float(np.sum(self.logprobs, dtype=np.float64))

    @property
    def mean(self) -> float:
        """Log-probability per token."""
        return self.sum / self.logprobs.size
