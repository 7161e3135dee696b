"""What comes back: one result per sample, one failure per job that could not have all of them."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from .base import Arrays, Floats, Message, Metadata, TokenIds
from .tools import ToolCall


class Segment(NamedTuple):
    """`tokens` consecutive tokens, all sampled with weights `version`."""

    version: Annotated[int, Field(ge=0)]
    tokens: Annotated[int, Field(ge=1)]


class Timings(BaseModel):
    """Where a sample's time went, seconds.

    queued: acceptance to the claim whose attempt finished it, by Redis' clock.
    generating: in the engine, all legs together, by the worker's clock.
    waiting: on the worker but not in the engine: for a slot, and while weights were updated.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    queued: float = Field(default=0.0, ge=0)
    generating: float = Field(default=0.0, ge=0)
    waiting: float = Field(default=0.0, ge=0)


def _check_sums(token_ids: TokenIds, logprobs: Floats | None, segments: tuple[Segment, ...]) -> None:
    tokens, total, newest = token_ids.size, 0, 0
    for version, count in segments:  # one loop: this is run for every result
        if version < newest:
            raise ValueError(f"segments {segments} go back in version")
        total, newest = total + count, version
    if total != tokens:
        raise ValueError(f"segments {segments} do not add up to {tokens} tokens")
    if logprobs is not None and logprobs.size != tokens:
        raise ValueError(f"{logprobs.size} logprobs for {tokens} tokens")


def _check_rows(token_ids: TokenIds, arrays: Arrays) -> None:
    for name, array in arrays.items():
        if not array.ndim or array.shape[0] != token_ids.size:
            raise ValueError(f"token_arrays[{name!r}] has shape {array.shape} for {token_ids.size} tokens")


def _check_adapter_sums(token_ids: TokenIds, segments: tuple[Segment, ...] | None) -> None:
    if segments is not None:
        try:
            _check_sums(token_ids, None, segments)
        except ValueError as error:
            raise ValueError(f"adapter_{error}") from None


class RolloutResult(Message):
    """One finished sample.

    finish_reason: "stop", "length", or "abort" for a sample that was asked to end with what it had (Broker.stop).
    token_ids: (t,) int32, what was generated; with what stopped it, unless sampling.include_stop is False.
    logprobs: (t,) float32 natural log-probabilities under the weights that sampled each token, or None if not asked
        for. With logit bias and penalties, before temperature and truncation: at temperature 1 without top-k, top-p
        and min-p they are the behaviour policy.
    logprob_kind: "scaled" if they, and those of the arrays, are after temperature instead.
    matched_stop: the stop that ended it: a token id, a text, a regular expression or a sequence of token ids.
    token_arrays: what else was asked for of each generated token, one row each:
        "top_ids" (t, N) int32 and "top_logprobs" (t, N) float32; "id_logprobs" (t, ids) float32 in the order of
        logprobs.token_ids; "hidden_states" (t, h) in the model's dtype, bfloat16 as its bits in uint16, of the
        forward pass that sampled the token; "routed_experts" (t, layers, k) int32, likewise: row 0 is the routing of
        the prompt's last token.
    arrays: what was asked for of the whole: "prompt_logprobs" (p,) float32, of the first token NaN, which know
        of no bias, penalty or processor, with
        "prompt_top_ids", "prompt_top_logprobs" and "prompt_id_logprobs" as above; "last_hidden_state" (h,);
        "prompt_routed_experts" (p, layers, k) int32.
    segments: versions and token counts in order; the counts add up to t, versions never decrease.
    adapter: name of the LoRA adapter that sampled it, None for the model alone.
    adapter_version: of that adapter, when the sample ended.
    adapter_segments: like `segments`, of the adapter's versions; more than one only if the sample went on elsewhere
        when its first version was not to be had any more.
    attempt: how many times the job had been claimed when this sample was published.
    prompt_ids: (p,) int32, the prompt's tokens. A worker sends them for jobs of text or messages. For jobs of token ids
        the client that submitted the job puts them here (it does not read them back); None if it does not know them:
        the job had ended before a client of this id opened, and was not submitted again.
    metadata: the job's.
    text: the decoded sample of such a job, else None.
    cached_tokens: so many of the prompt's tokens the engine had in its prefix cache when the worker that finished the
        sample began with it.
    session_id: of such a job.
    tool_calls: of a job with tools: the calls in it, valid and invalid ones, in order.
    fingerprint: engine, model, dtype, device: what a replay needs beside the job.
    """

    KIND: ClassVar[int] = 2
    ok: ClassVar[bool] = True

    job_id: str
    sample: int = Field(ge=0)
    n: int = Field(ge=1)
    group_id: str
    token_ids: TokenIds
    logprobs: Floats | None = None
    finish_reason: Literal["stop", "length", "abort"]
    matched_stop: int | str | tuple[int, ...] | None = None
    segments: tuple[Segment, ...] = ()
    adapter: str | None = None
    adapter_version: int | None = Field(default=None, ge=0)
    adapter_segments: tuple[Segment, ...] | None = None
    worker_id: str
    attempt: int = Field(ge=1)
    prompt_ids: TokenIds | None = None
    text: str | None = None
    cached_tokens: int = Field(default=0, ge=0)
    session_id: str | None = None
    logprob_kind: Literal["raw", "scaled"] = "raw"
    token_arrays: Arrays = Field(default_factory=dict)
    arrays: Arrays = Field(default_factory=dict)
    tool_calls: tuple[ToolCall, ...] = Field(default=(), max_length=128)
    timings: Timings = Timings()
    fingerprint: dict[str, str] = Field(default_factory=dict, max_length=32)
    metadata: Metadata = Field(default_factory=dict)
    trace_id: str | None = None

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        _check_sums(self.token_ids, self.logprobs, self.segments)
        _check_adapter_sums(self.token_ids, self.adapter_segments)
        _check_rows(self.token_ids, self.token_arrays)
        return self

    @property
    def versions(self) -> tuple[int, ...]:
        """The weights versions that sampled this, in order."""
        return tuple(segment.version for segment in self.segments)

    @property
    def oldest_version(self) -> int | None:
        """The oldest version among the tokens; None for an empty sample."""
        return self.segments[0].version if self.segments else None

    def learn(self, prompt_ids: TokenIds | None, metadata: Metadata) -> None:
        """Take the prompt from the client that has it; it does not count as set, so it does not travel again."""
        if self.prompt_ids is None:
            object.__setattr__(self, "prompt_ids", prompt_ids)


Outcome = Literal["cancelled", "expired", "dead"]


class JobFailure(Message):
    """A job's terminal outcome when it is not "all samples published".

    outcome: "cancelled" on request, "expired" past its deadline, "dead" when no worker can or should run it (again).
    cause: why, in one line; `error` the last exception text, `host` where it happened.
    attempts: how often it was claimed. published: how many of its samples had been published before; they stand.
    prompt_ids, metadata: the job's, as far as the client that hands this out knows them; they are not compared.
    """

    ok: ClassVar[bool] = False

    job_id: str
    group_id: str = ""
    outcome: Outcome
    cause: str
    attempts: int = 0
    published: int = 0
    host: str = ""
    error: str = ""
    prompt_ids: TokenIds | None = Field(default=None, exclude=True, repr=False)
    metadata: Metadata = Field(default_factory=dict, exclude=True, repr=False)

    def __str__(self) -> str:
        text = f"job {self.job_id} {self.outcome}: {self.cause}"
        if self.error:
            text += f" ({self.error})"
        return f"{text}; attempts={self.attempts}, samples published={self.published}"

    def learn(self, prompt_ids: TokenIds | None, metadata: Metadata) -> None:
        """Take the job's prompt and metadata from the client that submitted it."""
        object.__setattr__(self, "prompt_ids", prompt_ids)
        object.__setattr__(self, "metadata", metadata)


class Partial(Message):
    """A piece of what an unfinished sample has generated; the next worker continues from the last one.

    start: tokens before this piece. token_ids: (t,) int32. logprobs: (t,) float32. segments add up to t, as in
    RolloutResult; so do adapter_segments, None without an adapter. token_arrays as there, a row for each token; arrays
    as there, in the piece that was made when they were known.
    text: of a streamed job that has one: what these tokens add to the sample's text, whole characters only.
    """

    KIND: ClassVar[int] = 3

    start: int = Field(default=0, ge=0)
    token_ids: TokenIds
    logprobs: Floats
    segments: tuple[Segment, ...]
    adapter_segments: tuple[Segment, ...] | None = None
    token_arrays: Arrays = Field(default_factory=dict)
    arrays: Arrays = Field(default_factory=dict)
    text: str | None = None

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        _check_sums(self.token_ids, self.logprobs, self.segments)
        _check_adapter_sums(self.token_ids, self.adapter_segments)
        _check_rows(self.token_ids, self.token_arrays)
        return self
