"""Results as a worker answers the jobs of a request to OpenAI's API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rolloutmq.messages import RolloutResult, Segment
from rolloutmq.producer.openai import Request


def decode(ids: Sequence[int]) -> str:
    """A tokenizer of bytes: token 300 is special."""
    return bytes(token for token in ids if token < 256).decode(errors="replace")


def sample(request: Request, place: int = 0, number: int = 0, **fields: Any) -> RolloutResult:
    """Of the job at that place: one token of version 3 and two of version 4."""
    job = request.jobs[place]
    given: dict[str, Any] = {
        "job_id": job.id,
        "sample": number,
        "n": job.n,
        "group_id": job.group,
        "token_ids": [104, 105, 300],
        "logprobs": [-0.5, -1.0, -0.25],
        "finish_reason": "stop",
        "matched_stop": 300,
        "segments": (Segment(3, 1), Segment(4, 2)),
        "worker_id": "w",
        "attempt": 1,
    }
    if job.token_ids is None:
        given |= {"prompt_ids": [1, 2], "text": "hi"}
    return RolloutResult(**given | fields)
