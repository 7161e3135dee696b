"""Batches: many prompts at once, a group for each; and what a prompt may be."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ...messages.broker import Reply
from ...messages.errors import InvalidField, PoolBusy, WaitTimeout
from ...messages.model import MAX_TOKENS, ChatMessage, GenerateJob
from ..core import ClientCore
from ..data import from_openai
from ..inbox import Group, as_group

WINDOW = 4096
"""Most jobs that are submitted and not complete."""
RETRY_S = 0.2
"""Pause before what a full pool refused is submitted again."""
Messages = Sequence[ChatMessage | Mapping[str, Any]]
Prompt = str | Sequence[int] | npt.NDArray[Any] | Messages

ALLOWED = "token ids, a text, or messages ({'role': …, 'content': …}, …)"


def _media_in(message: Any) -> bool:
    """Whether a message brings media, as OpenAI's do, and not only places for them."""
    parts = message.get("content") if isinstance(message, Mapping) else None
    return isinstance(parts, list | tuple) and any(
        isinstance(part, Mapping) and part.keys() - {"type", "text"} for part in parts
    )


def prompt_fields(prompt: Any, name: str = "prompt") -> dict[str, Any]:
    """The field of GenerateJob for it, and `media` for messages that bring some. Raises InvalidField naming `name`.

    Media at a URL are left to the workers, and a message may name no path.
    """
    if isinstance(prompt, str):
        return {"text": prompt}
    count = prompt.size if isinstance(prompt, np.ndarray) else len(prompt) if isinstance(prompt, Sequence) else 0
    if count > MAX_TOKENS:  # before anything looks at each of them
        raise InvalidField(name, prompt, f"at most {MAX_TOKENS} token ids, got {count}")
    if isinstance(prompt, np.ndarray) and prompt.ndim == 1:
        return {"token_ids": prompt}
    if isinstance(prompt, Sequence) and not isinstance(prompt, bytes) and len(prompt):
        if all(isinstance(item, ChatMessage | Mapping) for item in prompt):
            if any(_media_in(item) for item in prompt):
                messages, media = from_openai(prompt, urls="worker")
                return {"messages": messages, "media": media}
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
    inbox, shards = core.inbox, core.broker.parts
    waiting, under_way = deque(jobs), deque[GenerateJob]()
    early: set[str] = set()  # accepted by their shards while one in front of them was not
    groups: list[Group] = []
    taken: list[Reply] = []
    held = dict.fromkeys(shards, 0)  # bytes in `taken`, by shard: each has caps of its own
    came = time.monotonic()
    try:
        while waiting or under_way:
            busy = await _submit(core, waiting, under_way, early)
            if (
                busy is not None
                and not under_way
                and any(held[it] > min(it.caps.unread, it.caps.nbytes) for it in shards)
            ):
                raise busy  # the pool is full of what this call holds: waiting changes nothing
            left = None if timeout is None else max(0.0, came + timeout - time.monotonic())
            pause = left if busy is None else RETRY_S if left is None else min(left, RETRY_S)
            try:
                await core.until(lambda: bool(under_way) and inbox.is_over(under_way[0].id), pause)
            except WaitTimeout:
                if busy is None or pause == left:
                    raise
                continue
            job = under_way.popleft()
            replies = inbox.take_job(job.id)
            inbox.release(job.id)
            groups.append(as_group(job.group, replies))
            taken += replies
            held[next(it for it in shards if it.has(job.id))] += sum(reply.nbytes for reply in replies)
            came = time.monotonic()
    except BaseException:
        core.hand_out(taken).give_back()
        await core.give_up([job.id for job in under_way] + [job.id for job in waiting if job.id in early])
        raise
    core.hand_over(taken)
    return groups


async def run(
    core: ClientCore,
    jobs: Sequence[GenerateJob],
    room_s: float,
    before_ack: Callable[[list[Group]], Awaitable[None]] | None,
) -> list[Group]:
    """Run these jobs and nothing else: a group for each, in order. The call owns them from beginning to end.

    room_s: seconds to wait for room in a full pool. before_ack(groups): awaited before the outcomes are acknowledged,
    for code that first makes them durable. A call that is cancelled, or raises, cancels its jobs, and no other call is
    told of them, unless the client was closed. Raises what `submit_many` raises, and RolloutMQError if one of the jobs
    belongs to another call.
    """
    taken: list[Reply] = []
    groups: list[Group] = []
    reserved: list[str] = []
    try:
        for job in jobs:
            core.inbox.reserve(job.id)
            reserved.append(job.id)
        await core.submit_many(jobs, room_s)
        for job in jobs:
            await core.until(lambda job=job: core.inbox.is_over(job.id), None, job.id)  # type: ignore[misc]
            replies = core.inbox.take_job(job.id)
            taken += replies
            groups.append(as_group(job.group, replies))
        if before_ack is not None:
            await before_ack(groups)
    except BaseException:
        core.hand_out(taken).give_back()
        await core.give_up(reserved, ended_too=True)
        raise
    for job_id in reserved:
        core.inbox.release(job_id)
    core.hand_over(taken)
    return groups


async def _submit(
    core: ClientCore, waiting: deque[GenerateJob], under_way: deque[GenerateJob], early: set[str]
) -> PoolBusy | None:
    """Move what may be outstanding from `waiting` to `under_way`, and submit it. Returns the error of a full pool.

    early: jobs that were accepted and wait for those in front of them. They stay reserved.
    """
    inbox, samples = core.inbox, core.inbox.samples
    batch: list[GenerateJob] = []
    while waiting and len(under_way) < WINDOW:
        samples += waiting[0].n
        if samples > core.max_outstanding and under_way:
            break
        if waiting[0].id not in early:
            inbox.reserve(waiting[0].id)
        batch.append(waiting.popleft())
        under_way.append(batch[-1])  # before it is sent: a call that ends gives it up
    if not batch:
        return None
    try:
        await core.submit_many(batch, 0.0)
    except PoolBusy as busy:
        early |= {batch[place].id for place in busy.beyond}
        for job in reversed(batch[busy.accepted :]):
            if job.id not in early:
                inbox.release(job.id)
            waiting.appendleft(under_way.pop())
        return busy
    return None
