"""Jobs that generate nothing: each of their inputs is one sample, so that all the queue promises holds for them too."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from .base import Floats, Message, Metadata, Submitted, TokenIds
from .chat import MAX_TEXT, ChatMessage
from .jobs import MAX_METADATA_ITEMS, MAX_SAMPLES, Priority
from .results import Timings

Conversation = Annotated[tuple[ChatMessage, ...], Field(min_length=1, max_length=4096)]


class TaskJob(Submitted):
    """What all of them have. The fields mean what they mean in GenerateJob.

    task: which kind of worker can do it: EngineInfo.features has "task:<task>".
    n: how many inputs there are; counted, not given.
    """

    task: ClassVar[Literal["embed", "reward", "score"]]

    id: str = ""
    reply_to: str = Field(default="", max_length=128)
    group_id: str = Field(default="", max_length=128)
    priority: Priority = "normal"
    deadline_s: float | None = Field(default=None, gt=0, le=30 * 86400.0)
    min_version: int = Field(default=0, ge=0)
    max_staleness: int | None = Field(default=None, ge=0)
    trace_id: str | None = Field(default=None, max_length=64)
    metadata: Metadata = Field(default_factory=dict, max_length=MAX_METADATA_ITEMS)

    lora: ClassVar[None] = None
    min_adapter_version: ClassVar[int] = 0

    @model_validator(mode="after")
    def _not_too_many(self) -> Self:
        if not 1 <= self.n <= MAX_SAMPLES:
            raise ValueError(f"{self.n} inputs: from 1 to {MAX_SAMPLES} in one job")
        return self

    @property
    def n(self) -> int:
        """Its inputs, each of which is one sample with one result."""
        raise NotImplementedError

    @property
    def group(self) -> str:
        """The group this job belongs to."""
        return self.group_id or self.id

    def features_used(self) -> list[str]:
        """What an engine must have for it, as in GenerateJob."""
        return [f"task:{self.task}"]

    def unsupported(self, features: frozenset[str]) -> list[str]:
        """Those of them that an engine with `features` does not have."""
        return [name for name in self.features_used() if name not in features]

    def value_of(self, name: str) -> Any:
        """What to show of it in an error about feature `name`."""
        return f"{type(self).__name__} of {self.n}"


class TaskResult(Message):
    """What came of one input of a TaskJob.

    sample: the input's number. n: how many the job has.
    version: of the weights it was computed with, all of it.
    tokens: of the input. The other fields are as in RolloutResult.
    """

    ok: ClassVar[bool] = True

    job_id: str
    sample: int = Field(ge=0)
    n: int = Field(ge=1)
    group_id: str
    version: int = Field(ge=0)
    tokens: int = Field(ge=0)
    worker_id: str
    attempt: int = Field(ge=1)
    timings: Timings = Timings()
    fingerprint: dict[str, str] = Field(default_factory=dict, max_length=32)
    metadata: Metadata = Field(default_factory=dict)
    trace_id: str | None = None


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
