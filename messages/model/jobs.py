"""The generation job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, ClassVar, Literal, Self, TypedDict, Unpack

import numpy.typing as npt
from pydantic import Field, model_validator

from .base import MAX_METADATA_ITEMS, Float, Int, Items, Metadata, Name, Submitted, TokenIds, exactly_one, too_large
from .chat import MAX_TEXT, ChatMessage
from .media import MAX_MEDIA, Medium, check_media
from .sampling import GRAMMARS, LogitProcessor, LogprobOptions, SamplingParams
from .tools import Tool

Priority = Literal["high", "normal", "low"]
PRIORITIES: tuple[Priority, ...] = ("high", "normal", "low")
MAX_SAMPLES = 4096
EXACT = "exact_version"
"""The feature of workers that know this field. Others would run such a job on any weights."""
Ids = Sequence[int] | npt.NDArray[Any]
"""Token ids as callers pass them."""


class QueueFields(TypedDict, total=False):
    """Arguments of every call that submits jobs, for editors and type checkers. GenerateJob documents them."""

    group_id: str
    priority: Priority
    deadline_s: float | None
    min_version: int
    exact_version: int | None
    max_staleness: int | None
    trace_id: str | None
    metadata: Metadata


class SharedFields(QueueFields, total=False):
    """Fields of GenerateJob that many prompts may share."""

    engine_priority: int
    prefer_worker: str | None
    prefer_s: float
    lora: str | None
    min_adapter_version: int
    logprobs: LogprobOptions | dict[str, Any]
    stream: bool
    hidden_states: Literal["none", "last", "all"]
    routed_experts: bool
    logit_processors: Sequence[LogitProcessor | dict[str, Any]]
    seed: int | None
    media: Sequence[Medium | dict[str, Any]]
    tools: Sequence[Tool | dict[str, Any]]
    tool_parser: str


class TurnFields(SharedFields, total=False):
    """Fields of GenerateJob for the turns of a session."""

    sampling: SamplingParams | dict[str, Any]


class JobFields(TurnFields, total=False):
    """All fields of GenerateJob."""

    id: str
    reply_to: str
    token_ids: Ids | None
    text: str | None
    messages: Sequence[ChatMessage | dict[str, Any]] | None
    n: int
    session_id: str | None
    context_ids: Ids | None


class GenerateJob(Submitted):
    """`n` samples of one prompt.

    The prompt is exactly one of `token_ids`, `text` and `messages`. The worker tokenises text and messages with the
    model's own tokenizer. The results of such a job carry their prompt ids and their text.

    id: submitting the same id again, until an hour after the job has ended, is not an error and not a second job.
    reply_to: the client whose reply stream gets the results. The client fills it in.
    group_id: jobs of one group are yielded and cancelled together. By default it is the job's own id.
    priority: the class in which the job waits in the pool. engine_priority: the highest number goes first among the
        samples that wait inside one engine, before its KV cache has room for them.
    deadline_s: seconds from acceptance after which the job expires, whether it is queued or running.
    min_version: the oldest weights version on which the job may start.
    exact_version: the one weights version that samples every token. The job waits until a worker has that version, and
        goes on with what it has on another such worker when its own takes a newer one. Not with a larger min_version,
        and not with max_staleness.
    max_staleness: how many versions a worker may be behind the newest committed one when the job starts there.
    context_ids: tokens before a prompt of text or messages, used as they are: the conversation so far, which `messages`
        continue. The result's prompt_ids contain both.
    session_id: a name that the results carry. RolloutClient.session documents sessions.
    prefer_worker: id of the worker that should run the job, as results name it, because it has the prefix in its cache.
        For prefer_s seconds no other worker takes the job, unless that worker's lease ends.
    lora: name of the LoRA adapter to sample with, None for the model alone. The pool must have a committed version of
        the adapter. A job for an adapter that was never published fails.
    min_adapter_version: the oldest version of that adapter on which the job may start.
    stream: the client can also read tokens as they are generated (RolloutClient.stream). The results are the same.
    hidden_states: return those of the last generated token, or of all tokens. routed_experts: return each token's.
    logit_processors: applied in order. docs/logits.md lists those that every worker has.
    seed: sample i gets a seed of its own, derived from this and i. A deterministic engine then repeats its tokens.
    media: images, videos and audio of the prompt, in the order of their places in it, those in context_ids first.
    tools: the chat template of a prompt of messages shows them to the model. RolloutResult.tool_calls has the calls.
    tool_parser: the syntax of those calls: "json", "xml", "function", or the name of a parser of SGLang.
    trace_id: comes back with every result. As a W3C traceparent it says to which trace the job's spans belong.
    metadata: up to 64 items of strings, numbers, booleans or None. Every result has them.
    """

    KIND: ClassVar[int] = 1
    OTHER_WORDS: ClassVar[Mapping[str, str]] = {
        "prompt": "token_ids=, text= or messages= is the prompt; logprobs=LogprobOptions(prompt=True) asks for its "
        "log-probabilities",
    }

    id: str = ""
    reply_to: str = Field(default="", max_length=128)
    token_ids: TokenIds | None = None
    text: str | None = Field(default=None, max_length=MAX_TEXT)
    messages: Items[ChatMessage] | None = Field(default=None, min_length=1, max_length=4096)
    n: Int = Field(default=1, ge=1, le=MAX_SAMPLES)
    sampling: SamplingParams = SamplingParams()
    group_id: str = Field(default="", max_length=128)
    priority: Priority = "normal"
    engine_priority: Int = Field(default=0, ge=-(1 << 31), lt=1 << 31)
    deadline_s: Float | None = Field(default=None, gt=0, le=30 * 86400.0)
    min_version: Int = Field(default=0, ge=0)
    exact_version: Int | None = Field(default=None, ge=0, lt=1 << 40)
    max_staleness: Int | None = Field(default=None, ge=0)
    session_id: Name | None = None
    context_ids: TokenIds | None = None
    prefer_worker: str | None = Field(default=None, min_length=1, max_length=256)
    prefer_s: Float = Field(default=2.0, gt=0, le=60.0)
    lora: Name | None = None
    min_adapter_version: Int = Field(default=0, ge=0)
    logprobs: LogprobOptions = LogprobOptions()
    stream: bool = False
    hidden_states: Literal["none", "last", "all"] = "none"
    routed_experts: bool = False
    logit_processors: Items[LogitProcessor] = Field(default=(), max_length=16)
    seed: Int | None = Field(default=None, ge=0, lt=1 << 63)
    trace_id: str | None = Field(default=None, max_length=64)
    media: Items[Medium] = Field(default=(), max_length=MAX_MEDIA)
    tools: Items[Tool] = Field(default=(), max_length=256)
    tool_parser: Name = "json"
    metadata: Metadata = Field(default_factory=dict, max_length=MAX_METADATA_ITEMS)

    @classmethod
    def build(cls, /, **fields: Unpack[JobFields]) -> Self:  # type: ignore[override]  # any fields, but not any names
        """Construct a job. Raises InvalidField, which names the field, its value and what is allowed."""
        return super().build(**fields)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        exactly_one(self, "token_ids", "text", "messages")
        if self.token_ids is not None and self.token_ids.size == 0:
            raise ValueError("token_ids: at least one prompt token is required")
        if self.context_ids is not None and self.token_ids is not None:
            raise ValueError("context_ids: only before text or messages; token_ids are the whole prompt")
        if self.text == "":
            raise ValueError("text: at least one character is required")
        if self.media or self.messages is not None:
            check_media(self.media, self.messages, before=self.context_ids is not None)
        if self.exact_version is not None:
            check_exact(self.exact_version, self.min_version, self.max_staleness)
        if self.min_adapter_version and self.lora is None:
            raise ValueError(f"min_adapter_version={self.min_adapter_version}: only together with lora")
        prompt = 0 if self.token_ids is None else self.token_ids.size
        if refused := too_large(self.logprobs.sizes(self.sampling.max_new_tokens, prompt)):
            raise ValueError(refused)
        return self

    @property
    def group(self) -> str:
        """The group this job belongs to."""
        return self.group_id or self.id

    def features_used(self) -> list[str]:
        """Names of the optional features that this job uses. EngineInfo.features says which an engine honours."""
        if not (self.model_fields_set & _OPTIONAL or self.sampling.model_fields_set & _OPTIONAL_SAMPLING):
            return []  # nearly all jobs
        return [name for name in FEATURES if self.value_of(name) != _PLAIN.value_of(name)]

    def unsupported(self, features: frozenset[str]) -> list[str]:
        """Names of the features that this job uses and that an engine with `features` does not honour."""
        return [name for name in self.features_used() if name not in features]

    def value_of(self, name: str) -> Any:
        """The value of a field by its dotted name: "seed", "logprobs.top"."""
        return attrgetter(name)(self)


def check_exact(exact: int, least: int, max_staleness: int | None) -> None:
    """Raises ValueError for bounds of versions that contradict the one version that is wanted."""
    if least > exact:
        raise ValueError(f"exact_version={exact}: at least min_version={least}")
    if max_staleness is not None:
        raise ValueError(f"exact_version={exact}: not together with max_staleness={max_staleness}")


FEATURES = (
    EXACT,
    "lora",
    "logprobs.top",
    "logprobs.prompt",
    "logprobs.token_ids",
    "logprobs.kind",
    "hidden_states",
    "routed_experts",
    "stream",
    "seed",
    "logit_processors",
    "media",
    "tools",
    "sampling.min_new_tokens",
    "sampling.stop",
    "sampling.stop_regex",
    "sampling.stop_token_sequences",
    *(f"sampling.{name}" for name in GRAMMARS),
)
"""Fields that not every engine honours. A job uses one of them if its value is not the default."""
_OPTIONAL = frozenset(name.partition(".")[0] for name in FEATURES) - {"sampling"}
_OPTIONAL_SAMPLING = frozenset(name.partition(".")[2] for name in FEATURES if name.startswith("sampling."))
_PLAIN = GenerateJob(token_ids=[0])
