"""Turns of recorded sessions: results that know their prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from support.specimens.messages import job, result

from rolloutmq.messages import RolloutResult, Segment


def turn(prompt: Sequence[int], output: Sequence[int], version: int = 0, **fields: Any) -> RolloutResult:
    """A turn whose log-probabilities are minus its token ids."""
    segments = (Segment(version, len(output)),) if output else ()
    logprobs = [-float(one) for one in output]
    known = {"prompt_ids": prompt, "token_ids": output, "logprobs": logprobs, "segments": segments}
    return result(job(), **(known | {"finish_reason": "stop"} | fields))
