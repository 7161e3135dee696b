"""Many prompts at once: each one's group, in their order."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from ...messages.broker import Reply
from ...messages.model import GenerateJob
from ..inbox import Group, Inbox, ReplyReader, as_group

if TYPE_CHECKING:
    from ..client import RolloutClient

WINDOW = 4096
"""Jobs submitted and not complete, at most."""


async def generate(
    client: RolloutClient,
    inbox: Inbox,
    reader: ReplyReader,
    until: Callable[[Callable[[], bool], float | None], Awaitable[None]],
    jobs: Sequence[GenerateJob],
    *,
    most: int,
    timeout: float | None,
) -> list[Group]:
    """See RolloutClient.generate. most: samples that may be outstanding; a job that has more goes alone."""
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
                    await client.submit_many(batch, timeout=None)
                first = under_way[0].id
                await until(lambda job=first: (it := inbox.tracked(job)) is None or it.ended, timeout)  # type: ignore[misc]
                replies = inbox.take_job(first)
                groups.append(as_group(under_way.popleft().group, replies))
                taken += replies
        except BaseException:
            await client.cancel([job.id for job in under_way])
            raise
    await reader.ack(taken)
    return groups
