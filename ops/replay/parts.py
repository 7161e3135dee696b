"""A recorded sample as the requests that generate it again: one for each that a worker made, and each version."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from ...messages.model import GenerateJob, LogprobOptions, Partial, Segment, cut_segments
from ...worker.engine import EngineOutput, EngineRequest
from ...worker.jobs import SampleRun
from ..journal import Recorded


@dataclass(slots=True)
class Part:
    """Tokens `start` to `end` (not included) of a sample, sampled with weights `version` by one request.

    run: the sample as a worker has it that continues at `start`. request: what asks an engine for these tokens.
    last: nothing cuts the request short, so that it also shows how the sample ended. switched: the tokens were sampled
    on KV of older weights, because weights were switched in place. lost: that KV cannot be made again.
    output: what the engine answered. problem: why there is none, or none that proves anything. doubt: why it proves
    something only if it has the recorded tokens and log-probabilities.
    """

    version: int
    start: int
    end: int
    run: SampleRun
    request: EngineRequest
    last: bool
    switched: bool = False
    lost: bool = False
    output: EngineOutput | None = None
    problem: str = ""
    doubt: str = ""


def obstacle(recorded: Recorded) -> str:
    """Why this sample cannot be generated again; "" if it can."""
    job, result = recorded.job, recorded.result
    if job is None:
        return recorded.problem or "the journal does not have its job"
    if recorded.prompt_ids is None or not recorded.prompt_ids.size:
        return "neither its job nor its result has the prompt's tokens"
    if not result.token_ids.size:
        return "it has no tokens, so nothing says which weights were there"
    if job.seed is None and job.sampling.temperature > 0 and job.sampling.top_k != 1:
        return "its job has no seed, so its tokens were drawn at random"
    return ""


def parts_of(recorded: Recorded) -> list[Part]:
    """The parts of a sample without an obstacle, in order.

    A part ends where other weights or another version of the adapter begin, where weights were switched in place, and
    where the sample was given to an engine again: there the KV cache was computed anew. So each request computes what
    the worker's request computed, in the same way.
    """
    job, result = recorded.job, recorded.result
    assert job is not None
    weights, adapters = _by_token(result.segments), _by_token(result.adapter_segments or ())
    starts = {0, *weights, *adapters, *result.legs, *result.in_place} - {len(result.token_ids)}
    parts: list[Part] = []
    version = adapter = leg = 0
    switched = lost = False
    for start, end in pairwise([*sorted(starts), len(result.token_ids)]):
        version, adapter = weights.get(start, version), adapters.get(start, adapter)
        if start in result.legs or not start:
            leg, switched, lost = start, False, False
        if start in result.in_place:
            switched, lost = True, lost or start == leg
        part = _part(recorded, _plain(job), version, start, end)
        behind = _next(result.legs, leg)
        key = f"{recorded.name}/{leg}" if any(leg < token < behind for token in result.in_place) else ""
        part.request = replace(
            part.request,
            cache_key=key or (f"{version}/{job.lora}@{adapter}" if job.lora else str(version)),
            adapter=job.lora or "",
            adapter_version=adapter,
        )
        part.switched, part.lost = switched, lost
        parts.append(part)
    return parts


def _plain(job: GenerateJob) -> GenerateJob:
    """The job without what has no influence on its tokens. The adapter's version is put into its requests."""
    return job.model_copy(
        update={
            "logprobs": LogprobOptions(kind=job.logprobs.kind),
            "hidden_states": "none",
            "routed_experts": False,
            "stream": False,
            "tools": (),
            "lora": None,
        }
    )


def _part(recorded: Recorded, job: GenerateJob, version: int, start: int, end: int) -> Part:
    result, prompt = recorded.result, recorded.prompt_ids
    assert prompt is not None
    run = SampleRun(job, prompt, result.sample, result.attempt, 0.0)
    if start:
        logprobs = np.zeros(start, np.float32) if result.logprobs is None else result.logprobs[:start]
        before = tuple(cut_segments(result.segments, end=start))
        run.resume_from([Partial(token_ids=result.token_ids[:start], logprobs=logprobs, segments=before)])
    last = end == len(result.token_ids) and result.finish_reason != "abort"
    request = run.next_request(version)
    return Part(version, start, end, run, request if last else replace(request, max_new_tokens=end - start), last)


def _by_token(segments: tuple[Segment, ...]) -> dict[int, int]:
    """First token -> version."""
    places = np.cumsum([0, *(tokens for _, tokens in segments)]).tolist()
    return {place: version for place, (version, _) in zip(places, segments, strict=False)}


def _next(legs: tuple[int, ...], leg: int) -> int:
    return min((start for start in legs if start > leg), default=1 << 31)
