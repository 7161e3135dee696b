"""What came of a batch, as SkyRL's trainers take it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...messages.model import GenerateJob, RolloutResult, Segment
from .requests import Wishes
from .texts import Texts
from .types import InferenceEngineOutput, VersionSpan, newest_version

Samples = Sequence[RolloutResult | None]
"""The samples of one job in order; None is one that was aborted before it began."""


def spans_of(segments: Sequence[Segment]) -> list[VersionSpan]:
    """Which tokens have which version."""
    spans: list[VersionSpan] = []
    start = 0
    for segment in segments:
        spans.append({"version": str(segment.version), "start": start, "end": start + segment.tokens})
        start += segment.tokens
    return spans


def output_of(
    jobs: Sequence[GenerateJob], found: Sequence[Samples], wishes: Wishes, texts: Texts
) -> InferenceEngineOutput:
    """One output for the whole batch: samples in the order of the jobs, decoded. Decoding takes its time."""
    samples = [
        (job, number, sample) for job, of_job in zip(jobs, found, strict=True) for number, sample in enumerate(of_job)
    ]
    ids = [sample.token_ids.tolist() if sample is not None else [] for _, _, sample in samples]
    spans = [spans_of(sample.segments) if sample is not None else [] for _, _, sample in samples]
    n = jobs[0].n if jobs else 1
    return {
        "responses": texts.decode_many(ids),
        "response_ids": ids,
        "stop_reasons": [sample.finish_reason if sample is not None else "abort" for _, _, sample in samples],
        "response_logprobs": [_logprobs(sample) for _, _, sample in samples] if wishes.logprobs else None,
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


def _hidden(sample: RolloutResult | None) -> Any:
    if sample is None:
        return None
    return sample.token_arrays.get("hidden_states", sample.arrays.get("last_hidden_state"))


def _experts(sample: RolloutResult | None) -> Any:
    experts = sample.token_arrays.get("routed_experts") if sample is not None else None
    return experts.reshape(-1) if experts is not None else None
