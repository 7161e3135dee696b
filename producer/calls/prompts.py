"""What a prompt may be: token ids, a text, or messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ...messages.errors import InvalidField
from ...messages.model import ChatMessage, GenerateJob

Messages = Sequence[ChatMessage | Mapping[str, Any]]
Prompt = str | Sequence[int] | npt.NDArray[Any] | Messages

ALLOWED = "token ids, a text, or messages ({'role': …, 'content': …}, …)"


def prompt_fields(prompt: Any, name: str = "prompt") -> dict[str, Any]:
    """The field of GenerateJob for it. Raises InvalidField naming `name`."""
    if isinstance(prompt, str):
        return {"text": prompt}
    if isinstance(prompt, np.ndarray):
        return {"token_ids": prompt}
    if isinstance(prompt, Sequence) and not isinstance(prompt, bytes) and len(prompt):
        if all(isinstance(item, ChatMessage | Mapping) for item in prompt):
            return {"messages": tuple(prompt)}
        if all(isinstance(item, int | np.integer) and not isinstance(item, bool) for item in prompt):
            return {"token_ids": [int(item) for item in prompt]}
    raise InvalidField(name, prompt, ALLOWED)


def as_jobs(prompts: Iterable[Any], **fields: Any) -> list[GenerateJob]:
    """A job for each prompt. Raises InvalidField, naming the prompt by its place."""
    jobs: list[GenerateJob] = []
    for place, prompt in enumerate(prompts):
        given = prompt_fields(prompt, f"prompts[{place}]")
        jobs.append(GenerateJob.build(**fields | given))
    return jobs
