"""The output of a batch as the dictionaries of SkyRL's trainers, whole or chunk by chunk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypedDict

import numpy as np

from ...messages.model import GenerateJob, RolloutResult
from ..calls import Delta
from ..data import Texts
from ..openai import GrowingText, Tokens, version_spans
from .requests import Wishes
from .versions import VersionNames

Samples = Sequence[RolloutResult | None]
"""The samples of one job in order; None is one that was aborted before it began."""


class VersionSpan(TypedDict):
    """Tokens `start` to `end` (not included) of a sample were sampled with `version`; named as SGLang names them.

    number: the pool's number of that version.
    """

    version: str
    number: int
    start: int
    end: int


class InferenceEngineOutput(TypedDict):
    """Samples in the order of the prompts; with n > 1 the n of the first prompt, then those of the second, …

    responses: tokenizer.decode(ids, skip_special_tokens=True). response_ids: the generated ids. They include the stop,
        unless the parameters exclude it.
    stop_reasons: "stop", "length" or "abort".
    response_logprobs: those of the sampled tokens, None unless the batch asks for `logprobs`.
    top_logprobs: with `logprobs` above 1, for every token {id: logprob} of the likeliest ones at its place.
    prompt_logprobs: with `prompt_logprobs`, one for each token of the sample's prompt, None for the first.
    weight_version: the version of every token, or the newest one if there are several. None if there are no tokens.
    weight_versions: an addition to SkyRL: the version of each token, as spans without gaps for each sample.
    n_per_prompt: n if it is more than 1, else None.
    request_ids: one per sample.
    hidden_states: (t, h) float arrays, one per sample, from the forward passes that sampled the tokens.
    routed_experts: flat int32 arrays of t * layers * k expert numbers, one per sample.
    """

    responses: list[str]
    response_ids: list[list[int]]
    stop_reasons: list[str]
    response_logprobs: list[list[float]] | None
    top_logprobs: list[list[dict[int, float]]] | None
    prompt_logprobs: list[list[float | None]] | None
    weight_version: str | None
    weight_versions: list[list[VersionSpan]]
    n_per_prompt: int | None
    request_ids: list[str] | None
    hidden_states: list[Any] | None
    routed_experts: list[Any] | None


class StreamingChunk(TypedDict):
    """One token of one sample, `index` in the order of InferenceEngineOutput. A last chunk may be without a token.

    delta_text: the text that the token completes. delta_token_id: the token, None if there is none.
    delta_logprob: its log-probability, None unless asked for.
    cumulative_text, cumulative_token_ids: all so far. They begin anew if a worker with an older version had to take
        the sample over.
    """

    index: int
    delta_text: str
    delta_token_id: int | None
    delta_logprob: float | None
    is_finished: bool
    stop_reason: str | None
    cumulative_text: str
    cumulative_token_ids: list[int]


def spans_of(sample: RolloutResult | None, versions: VersionNames) -> list[VersionSpan]:
    """The version of each token, as spans."""
    return [
        {
            "version": versions.text(span["version"]),
            "number": span["version"],
            "start": span["start"],
            "end": span["end"],
        }
        for span in version_spans(sample.segments if sample is not None else ())
    ]


def output_of(
    jobs: Sequence[GenerateJob], found: Sequence[Samples], wishes: Wishes, texts: Texts, versions: VersionNames
) -> InferenceEngineOutput:
    """One output for the whole batch: decoded samples in the order of the jobs. Decoding blocks."""
    samples = [
        (job, number, sample) for job, of_job in zip(jobs, found, strict=True) for number, sample in enumerate(of_job)
    ]
    ids = [sample.token_ids.tolist() if sample is not None else [] for _, _, sample in samples]
    spans = [spans_of(sample, versions) for _, _, sample in samples]
    n = jobs[0].n if jobs else 1
    return {
        "responses": texts.decode_many(ids),
        "response_ids": ids,
        "stop_reasons": [sample.finish_reason if sample is not None else "abort" for _, _, sample in samples],
        "response_logprobs": [_logprobs(sample) for _, _, sample in samples] if wishes.logprobs else None,
        "top_logprobs": [_top(sample) for _, _, sample in samples] if wishes.top_logprobs else None,
        "prompt_logprobs": [_of_prompt(sample) for _, _, sample in samples] if wishes.prompt_logprobs else None,
        "weight_version": newest_version(spans),
        "weight_versions": spans,
        "n_per_prompt": n if n > 1 else None,
        "request_ids": [request_id(job.id, number) for job, number, _ in samples],
        "hidden_states": [_hidden(sample) for _, _, sample in samples] if wishes.hidden_states else None,
        "routed_experts": [_experts(sample) for _, _, sample in samples] if wishes.routed_experts else None,
    }


def request_id(job_id: str, sample: int) -> str:
    """Names one sample of a job."""
    return f"{job_id}-{sample:04x}"


def _logprobs(sample: RolloutResult | None) -> list[float]:
    return [] if sample is None or sample.logprobs is None else sample.logprobs.tolist()


def _top(sample: RolloutResult | None) -> list[dict[int, float]]:
    if sample is None:
        return []
    return [dict(row) for row in Tokens.of(sample.token_ids, sample.logprobs, sample.token_arrays).top or ()]


def _of_prompt(sample: RolloutResult | None) -> list[float | None]:
    if sample is None or "prompt_logprobs" not in sample.arrays:
        return []
    return [None, *sample.arrays["prompt_logprobs"].tolist()[1:]]


def _hidden(sample: RolloutResult | None) -> Any:
    if sample is None:
        return None
    return sample.token_arrays.get("hidden_states", sample.arrays.get("last_hidden_state"))


def _experts(sample: RolloutResult | None) -> Any:
    experts = sample.token_arrays.get("routed_experts") if sample is not None else None
    return experts.reshape(-1).astype(np.int32) if experts is not None else None


class StreamedSample:
    """The part of a sample that its caller has seen. index: its place in the order of InferenceEngineOutput."""

    def __init__(self, index: int, texts: Texts, logprobs: bool) -> None:
        self.index, self._texts, self._logprobs = index, texts, logprobs
        self.ids: list[int] = []
        self._text = GrowingText(texts.decode)

    def chunks(self, delta: Delta) -> Iterator[StreamingChunk]:
        """A chunk for each token of a delta. The delta of a restarted sample has all of its tokens."""
        if delta.restarted:
            self.ids, self._text = [], GrowingText(self._texts.decode)
        ids: list[int | None] = delta.token_ids.tolist()
        logprobs = delta.logprobs.tolist() if self._logprobs and delta.logprobs is not None else [None] * len(ids)
        stop = delta.result.finish_reason if delta.result is not None else None
        if stop is not None and not ids:
            ids, logprobs = [None], [None]
        for place, (token, logprob) in enumerate(zip(ids, logprobs, strict=True), 1):
            yield self._made(token, logprob, stop if place == len(ids) else None)

    def aborted(self) -> StreamingChunk:
        """The last chunk of a sample that was stopped before it had a result."""
        return self._made(None, None, "abort")

    def _made(self, token: int | None, logprob: float | None, stop: str | None) -> StreamingChunk:
        new = [] if token is None else [token]
        self.ids += new
        return {
            "index": self.index,
            "delta_text": self._text.add(new, last=stop is not None),
            "delta_token_id": token,
            "delta_logprob": logprob,
            "is_finished": stop is not None,
            "stop_reason": stop,
            "cumulative_text": self._text.text,
            "cumulative_token_ids": list(self.ids),
        }


def group_outputs_by_prompt(output: InferenceEngineOutput) -> list[InferenceEngineOutput]:
    """One output per prompt, each with all of its samples. None has `n_per_prompt` unless it is more than 1."""
    n = output.get("n_per_prompt") or 1
    count = len(output["response_ids"])
    groups: list[InferenceEngineOutput] = []
    for start in range(0, count, n):
        part: dict[str, Any] = {
            key: value[start : start + n] if isinstance(value, list) else value for key, value in output.items()
        }
        part["weight_version"] = newest_version(part["weight_versions"]) if "weight_versions" in part else None
        groups.append(part)  # type: ignore[arg-type]
    return groups


def newest_version(spans: list[list[VersionSpan]]) -> str | None:
    """The newest version among the samples' tokens, None without tokens."""
    found = [span for sample in spans for span in sample]
    return max(found, key=lambda span: span["number"])["version"] if found else None
