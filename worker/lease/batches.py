"""Batches for one call to Redis, and what one entry of a batch that cannot be written means for the others."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import TypeVar

from redis.exceptions import RedisError, ResponseError

from ...messages.broker import MAX_CALL_BYTES
from ...messages.redis import name_once

T = TypeVar("T")
MAX_BATCH = 128
_SCRIPT = re.compile(r"(?!BUSY).*(user_script|Error running script)", re.DOTALL)


def batches(items: Iterable[T], bytes_of: Callable[[T], int]) -> Iterator[list[T]]:
    """`items` in lists that are small enough for one call to Redis."""
    batch: list[T] = []
    nbytes = 0
    for item in items:
        size = bytes_of(item)
        if batch and (len(batch) >= MAX_BATCH or nbytes + size > MAX_CALL_BYTES):
            yield batch
            batch, nbytes = [], 0
        batch.append(item)
        nbytes += size
    if batch:
        yield batch


def is_about_data(error: RedisError | OSError) -> bool:
    """Whether a script failed at something that it found in Redis, so that it fails again with the same entry.

    False for a Redis that is away, busy, full, or refuses all writes.
    """
    return type(error) is ResponseError and _SCRIPT.match(str(error)) is not None


async def each(
    entries: list[T], send: Callable[[list[T]], Awaitable[None]], leave: Callable[[T, Exception], None]
) -> None:
    """Send a batch. If something in Redis is in its way, send each entry alone, and `leave` those that still fail.

    Scripts isolate entries themselves (`alone` in lib.lua), and end a job that is in the way with its cause. This is
    for what they cannot end, and for errors that they do not know: the same batch would be sent for ever.

    Raises RedisError or OSError if Redis takes none of them.
    """
    try:
        await send(entries)
    except (RedisError, OSError) as error:
        if not is_about_data(error):
            raise
        if len(entries) == 1:
            name_once(str(error))
            leave(entries[0], error)
            return
        for entry in entries:
            await each([entry], send, leave)
