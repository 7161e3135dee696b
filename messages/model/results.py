"""Outcomes of a job: one result for each sample, and one failure for a job that did not finish all of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import Field, StrictInt, model_validator

from ..shown import cut, short_id, shown, told_versions
from .base import Arrays, Float, Floats, Items, Message, Metadata, Record, TokenIds
from .tools import ToolCall


class Segment(NamedTuple):
    """`tokens` consecutive tokens, all sampled with weights `version`."""

    version: Annotated[StrictInt, Field(ge=0)]
    tokens: Annotated[StrictInt, Field(ge=1)]


def join_segments(segments: Iterable[Segment]) -> list[Segment]:
    """Neighbours of one version become one segment."""
    joined: list[Segment] = []
    for segment in segments:
        if joined and joined[-1].version == segment.version:
            joined[-1] = Segment(segment.version, joined[-1].tokens + segment.tokens)
        else:
            joined.append(segment)
    return joined


def cut_segments(segments: Iterable[Segment], start: int = 0, end: int | None = None) -> list[Segment]:
    """The segments of tokens `start` to `end` (not included; None is the last one)."""
    kept: list[Segment] = []
    place = 0
    for version, tokens in segments:
        upto = place + tokens if end is None else min(place + tokens, end)
        if (inside := upto - max(place, start)) > 0:
            kept.append(Segment(version, inside))
        place += tokens
    return kept


class Timings(Record):
    """How long a sample took, in seconds.

    queued: from acceptance to the claim whose attempt finished the sample, by Redis' clock.
    generating: in the engine, all legs together, by the worker's clock.
    waiting: on the worker outside the engine: for a slot, and while weights were updated.
    """

    queued: Float = Field(default=0.0, ge=0)
    generating: Float = Field(default=0.0, ge=0)
    waiting: Float = Field(default=0.0, ge=0)


def _add_up(token_ids: TokenIds, segments: tuple[Segment, ...], name: str) -> None:
    tokens, total, newest = token_ids.size, 0, 0
    for version, count in segments:  # one loop, because this runs for every result
        if version < newest:
            raise ValueError(f"{name} {segments} go back in version")
        total, newest = total + count, version
    if total != tokens:
        raise ValueError(f"{name} {segments} do not add up to {tokens} tokens")


def _ascend(offsets: tuple[int, ...], first: int, end: int, name: str) -> None:
    if list(offsets) != sorted({*offsets}) or (offsets and not first <= offsets[0] <= offsets[-1] < end):
        raise ValueError(f"{name} {offsets} are not ascending numbers of tokens from {first} up to {end - 1}")


class _Tokens(Message):
    """Checks that what belongs to tokens has their length. It has no fields, because their order is on the wire."""

    @model_validator(mode="after")
    def _lengths_agree(self: Any) -> Any:
        tokens = self.token_ids.size
        _add_up(self.token_ids, self.segments, "segments")
        if self.logprobs is not None and self.logprobs.size != tokens:
            raise ValueError(f"{self.logprobs.size} logprobs for {tokens} tokens")
        if self.adapter_segments is not None:
            _add_up(self.token_ids, self.adapter_segments, "adapter_segments")
        if self.legs or self.in_place:
            first = self.start if isinstance(self, Partial) else 0
            _ascend(self.legs, first, first + tokens, "legs")
            _ascend(self.in_place, first, first + tokens, "in_place")
        for name, array in self.token_arrays.items():
            if not array.ndim or array.shape[0] != tokens:
                raise ValueError(f"token_arrays[{name!r}] has shape {array.shape} for {tokens} tokens")
        return self


class RolloutResult(_Tokens):
    """One finished sample.

    finish_reason: "stop", "length", or "abort" for a sample that was stopped early and kept its tokens (Broker.stop).
    token_ids: (t,) int32, the generated tokens. They include the stop, unless sampling.include_stop is False.
    logprobs: (t,) float32, natural log-probabilities under the weights that sampled each token, or None if the job did
        not ask for them. They include logit bias and penalties, and are taken before temperature and truncation. At
        temperature 1 without top-k, top-p and min-p they are the behaviour policy.
    logprob_kind: "scaled" if the log-probabilities here and in the arrays are taken after temperature instead.
    matched_stop: the stop that ended the sample: a token id, a text, a regular expression or a sequence of token ids.
    token_arrays: optional data for each generated token, one row per token:
        "top_ids" (t, N) int32 and "top_logprobs" (t, N) float32; "id_logprobs" (t, ids) float32 in the order of
        logprobs.token_ids; "hidden_states" (t, h) in the model's dtype (bfloat16 as its bits in uint16), from the
        forward pass that sampled the token; "routed_experts" (t, layers, k) from the same pass, so row 0 is the
        routing of the prompt's last token: uint8 for up to 256 experts, uint16 for more, int32 from older workers.
    arrays: optional data for the whole sample: "prompt_logprobs" (p,) float32, where the first one is NaN and bias,
        penalties and processors have no effect; "prompt_top_ids", "prompt_top_logprobs" and "prompt_id_logprobs" as
        above; "last_hidden_state" (h,); "prompt_routed_experts" (p, layers, k).
    segments: versions and token counts in order. The counts add up to t, and versions never decrease.
    adapter: name of the LoRA adapter that sampled the tokens, None for the model alone.
    adapter_version: the adapter's version when the sample ended.
    adapter_segments: like `segments`, for the adapter's versions. There is more than one only if the sample continued
        where its first version was no longer available.
    legs: numbers of the tokens, ascending, at which the sample was given to an engine again: after an interruption, or
        by another worker. There the engine computed the KV cache of everything before anew, with the weights that
        sampled that token. Empty for a sample of one request.
    in_place: numbers of the tokens, ascending, at which weights were switched in place under the running request. From
        such a token to the next of `legs`, or to the end, newer weights sampled on KV of older ones; everywhere else KV
        is of the version that sampled the token, because prefix caches are keyed by version. The KV before such a token
        is of the versions that `segments` has since the leg began. At a token of `legs`, or a sample's first one, it
        says that older weights have read a part of what is before it. What an engine takes back after a switch, and
        computes anew, is not told.
    attempt: how many times the job had been claimed when this sample was published.
    prompt_ids: (p,) int32, the prompt's tokens. A worker sends them for jobs of text or messages. For jobs of token ids
        the client that submitted the job fills them in without reading them back. None if it does not know them: the
        job had ended before a client of this id opened, and was not submitted again.
    metadata: the job's metadata.
    text: the decoded sample for a job of text or messages, else None.
    cached_tokens: how many of the prompt's tokens the engine had in its prefix cache when the worker that finished the
        sample began it.
    session_id: the job's session_id.
    tool_calls: for a job with tools, the calls in the sample, valid and invalid, in order.
    fingerprint: engine, model, dtype and device, and "deterministic" if the engine is; a replay needs it
    """

    KIND: ClassVar[int] = 2
    ok: ClassVar[bool] = True

    job_id: str
    sample: StrictInt = Field(ge=0)
    n: StrictInt = Field(ge=1)
    group_id: str
    token_ids: TokenIds
    logprobs: Floats | None = None
    finish_reason: Literal["stop", "length", "abort"]
    matched_stop: StrictInt | str | Items[StrictInt] | None = None
    segments: Items[Segment] = ()
    adapter: str | None = None
    adapter_version: StrictInt | None = Field(default=None, ge=0)
    adapter_segments: Items[Segment] | None = None
    worker_id: str
    attempt: StrictInt = Field(ge=1)
    prompt_ids: TokenIds | None = None
    text: str | None = None
    cached_tokens: StrictInt = Field(default=0, ge=0)
    session_id: str | None = None
    logprob_kind: Literal["raw", "scaled"] = "raw"
    token_arrays: Arrays = Field(default_factory=dict)
    arrays: Arrays = Field(default_factory=dict)
    tool_calls: Items[ToolCall] = Field(default=(), max_length=128)
    timings: Timings = Timings()
    fingerprint: dict[str, str] = Field(default_factory=dict, max_length=32)
    metadata: Metadata = Field(default_factory=dict)
    trace_id: str | None = None
    legs: Items[StrictInt] = ()
    in_place: Items[StrictInt] = ()

    @property
    def versions(self) -> tuple[int, ...]:
        """The weights versions that sampled the tokens, in order."""
        return tuple(segment.version for segment in self.segments)

    @property
    def oldest_version(self) -> int | None:
        """The oldest version among the tokens, None for an empty sample."""
        return self.segments[0].version if self.segments else None

    def __repr__(self) -> str:
        """One line; `model_dump` has everything."""
        place = f"{short_id(self.job_id)} sample {self.sample} of {self.n}: {self.token_ids.size:,} tokens"
        adapter = "" if self.adapter is None else f"adapter {short_id(self.adapter)}@{self.adapter_version}"
        text = "" if self.text is None else cut(self.text)
        return shown(self, place, told_versions(self.versions), adapter, self.finish_reason, text)

    __str__ = __repr__

    def learn(self, prompt_ids: TokenIds | None, metadata: Metadata) -> None:
        """Take the prompt from the client that has it. It does not count as set, so it is not sent again."""
        if self.prompt_ids is None:
            object.__setattr__(self, "prompt_ids", prompt_ids)


Outcome = Literal["cancelled", "expired", "dead"]


class JobFailure(Message):
    """The outcome of a job that ended before all of its samples were published.

    outcome: "cancelled" on request, "expired" past its deadline, "dead" when no worker can or should run it again.
    cause: the reason in one line. error: the last exception text. host: where that happened.
    attempts: how often the job was claimed. published: how many of its samples were published before. They stay valid.
    prompt_ids, metadata: the job's, as far as the client knows them. They are not compared.
    """

    ok: ClassVar[bool] = False

    job_id: str
    group_id: str = ""
    outcome: Outcome
    cause: str
    attempts: int = 0  # a text on the reply stream, as the script wrote it
    published: int = 0
    host: str = ""
    error: str = ""
    prompt_ids: TokenIds | None = Field(default=None, exclude=True, repr=False)
    metadata: Metadata = Field(default_factory=dict, exclude=True, repr=False)

    def __repr__(self) -> str:
        told = f"{short_id(self.job_id)} {self.outcome}: {cut(self.cause)}"
        error = f"error {cut(self.error)}" if self.error else ""
        return shown(self, told, error, f"{self.attempts} attempts", f"{self.published} samples published")

    def __str__(self) -> str:
        text = f"job {self.job_id} {self.outcome}: {self.cause}"
        if self.error:
            text += f" ({self.error})"
        return f"{text}; attempts={self.attempts}, samples published={self.published}"

    def learn(self, prompt_ids: TokenIds | None, metadata: Metadata) -> None:
        """Take the job's prompt and metadata from the client that submitted the job."""
        object.__setattr__(self, "prompt_ids", prompt_ids)
        object.__setattr__(self, "metadata", metadata)


class Partial(_Tokens):
    """A piece of an unfinished sample. The next worker continues after the last one.

    start: number of tokens before this piece. token_ids: (t,) int32. logprobs: (t,) float32.
    segments, adapter_segments, token_arrays: for these t tokens, as in RolloutResult.
    arrays: as in RolloutResult, in the piece that was made when they became known.
    legs, in_place: as in RolloutResult, of these tokens, but counted from the sample's first token.
    text: for a streamed job with text, what these tokens add to the sample's text, in whole characters.
    """

    KIND: ClassVar[int] = 3

    start: StrictInt = Field(default=0, ge=0)
    token_ids: TokenIds
    logprobs: Floats
    segments: Items[Segment]
    adapter_segments: Items[Segment] | None = None
    token_arrays: Arrays = Field(default_factory=dict)
    arrays: Arrays = Field(default_factory=dict)
    text: str | None = None
    legs: Items[StrictInt] = ()
    in_place: Items[StrictInt] = ()
