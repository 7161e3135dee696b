"""Batches: many prompts at once, a group for each; and what a prompt may be."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ...messages.broker import Reply
from ...messages.errors import InvalidField
from ...messages.model import ChatMessage, GenerateJob
from ..core import ClientCore
from ..inbox import Group, as_group

WINDOW = 4096
"""Most jobs that are submitted and not complete."""
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


async def generate(core: ClientCore, jobs: Sequence[GenerateJob], timeout: float | None) -> list[Group]:
    """See RolloutClient.generate. A job with more samples than may be outstanding is submitted alone."""
    inbox, most = core.inbox, core.max_outstanding
    waiting, under_way = deque(jobs), deque[GenerateJob]()
    groups: list[Group] = []
    taken: list[Reply] = []
    with contextlib.ExitStack() as kept:
        try:
            while waiting or under_way:
                batch: list[GenerateJob] = []
                samples = inbox.samples
                while waiting and len(under_way) + len(batch) < WINDOW:
                    samples += waiting[0].n
                    if samples > most and (under_way or batch):
                        break
                    batch.append(waiting.popleft())
                    kept.enter_context(inbox.reserved(batch[-1].id))
                under_way.extend(batch)
                if batch:
                    await core.submit_many(batch, None)
                first = under_way[0].id
                await core.until(lambda job=first: (it := inbox.tracked(job)) is None or it.ended, timeout)  # type: ignore[misc]
                replies = inbox.take_job(first)
                groups.append(as_group(under_way.popleft().group, replies))
                taken += replies
        except BaseException:
            await core.cancel([job.id for job in under_way])
            raise
    core.reader.ack(taken)
    return groups
