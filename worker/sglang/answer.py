"""The answer of SGLang to one request of any kind."""

from __future__ import annotations

import asyncio
from typing import Any


async def answer(manager: Any, request: Any) -> dict[str, Any] | None:
    """The last thing SGLang says to `request`, or None if it was aborted before it reached the scheduler.

    request: one of SGLang's request objects, with a `rid`. Raises what SGLang raises: ValueError for a request that it
    refuses.
    """
    last: dict[str, Any] | None = None
    try:
        # To its end, not just the first item: only that gives back the lock that a weight update waits for.
        async for item in manager.generate_request(request, None):
            last = item
    except ValueError as error:
        if type(error).__name__ == "RequestAbortedError":
            return None
        raise
    except asyncio.CancelledError:
        manager.abort_request(request.rid)
        raise
    return last


def aborted(found: dict[str, Any] | None) -> bool:
    """Whether there is no answer: it was aborted, before or in the scheduler."""
    return found is None or (found["meta_info"].get("finish_reason") or {}).get("type") == "abort"
