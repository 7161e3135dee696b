"""What came of a request with a key, as bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, cast

import numpy as np
from pydantic import Field

from ...messages.codec import MAX_ITEMS, RESULTS, Result, decode, decode_one_of, encode
from ...messages.errors import JobFailed, MalformedMessage, RolloutMQError, TurnRefused
from ...messages.model import JobFailure, Message, RolloutResult, TokenIds

Answer = list[list[Result]] | JobFailure
"""What came of a request: the results of each of its jobs, by sample; or why there are none."""
Results = list[list[RolloutResult]]
"""The samples of each of a request's jobs, in order."""
MAX_JOBS = MAX_ITEMS
LATER = {"pool", "memory"}
"""Reasons of a TurnRefused after which the turn can be recorded later."""
REFUSED = "session_"
"""The error of a turn that its session does not take begins so; the reason follows."""
NONE = np.empty(0, np.int32)


class Kept(Message):
    """An answer, or the prompts of a request that runs.

    prompts: of each job, (p,) int32; empty where its results carry it. results: of each job, encoded.
    """

    KIND: ClassVar[int] = 48

    prompts: tuple[TokenIds, ...] = Field(default=(), max_length=MAX_JOBS)
    results: tuple[tuple[bytes, ...], ...] = Field(default=(), max_length=MAX_JOBS)
    failure: JobFailure | None = None


def pack(answer: Answer, prompts: Sequence[TokenIds | None] = ()) -> bytes:
    """prompts: of its jobs, where the caller knows them. Raises InvalidField for an answer that is too large."""
    if isinstance(answer, JobFailure):
        return encode(Kept(failure=answer))
    known = [*prompts, *[None] * len(answer)]
    return encode(
        Kept(
            prompts=tuple(_prompt(results, prompt) for results, prompt in zip(answer, known, strict=False)),
            results=tuple(tuple(encode(it) for it in results) for results in answer),
        )
    )


def _prompt(results: Sequence[Result], known: TokenIds | None) -> TokenIds:
    """What results do not carry over the wire."""
    first = results[0] if results else None
    if not isinstance(first, RolloutResult) or "prompt_ids" in first.model_fields_set:
        return NONE
    prompt = first.prompt_ids if known is None else known
    return NONE if prompt is None else prompt


def unpack(data: bytes) -> Answer:
    """Raises MessageError for what `pack` does not write."""
    kept = decode(data, Kept)
    if kept.failure is not None:
        return kept.failure
    if not kept.results or len(kept.results) != len(kept.prompts):
        raise MalformedMessage(f"an answer with {len(kept.results)} jobs and {len(kept.prompts)} prompts")
    answer = [[decode_one_of(it, RESULTS) for it in job] for job in kept.results]
    for results, prompt in zip(answer, kept.prompts, strict=True):
        learn(results, prompt if prompt.size else None)
    return answer


def refusal_of(job_id: str, refused: RolloutMQError) -> JobFailure:
    """The answer of a request whose results could not be recorded."""
    error = f"{REFUSED}{refused.reason}" if isinstance(refused, TurnRefused) else ""
    return JobFailure(job_id=job_id, outcome="dead", cause=str(refused), error=error)


def results_of(answer: Answer) -> Results:
    """The results in an answer. Raises JobFailed, and TurnRefused for what `refusal_of` makes."""
    if isinstance(answer, JobFailure):
        if answer.error.startswith(REFUSED):
            raise TurnRefused(answer.cause, answer.error.removeprefix(REFUSED))
        raise JobFailed(answer)
    return cast(Results, answer)


def learn(results: Sequence[Result], prompt: TokenIds | None) -> None:
    """Tell results their prompt, if they do not know it."""
    for result in results:
        if isinstance(result, RolloutResult):
            result.learn(prompt, result.metadata)


def pack_prompts(prompts: Sequence[TokenIds | None]) -> bytes:
    """The prompts of a request's jobs; None where the worker makes the tokens."""
    return encode(Kept(prompts=tuple(NONE if it is None else it for it in prompts)))


def unpack_prompts(data: bytes) -> tuple[TokenIds | None, ...]:
    """Raises MessageError for what `pack_prompts` does not write."""
    prompts = decode(data, Kept).prompts
    if not prompts:
        raise MalformedMessage("a request without jobs")
    return tuple(it if it.size else None for it in prompts)
