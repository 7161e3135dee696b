"""Loops that run as long as the worker does, whatever they meet."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from ..messages.errors import EngineError, LeaseLost

log = logging.getLogger(__name__)
RETRY_S = 0.2
Loop = Callable[[], Awaitable[None]]


async def undisturbed(loop: Loop) -> None:
    """Run `loop`, and begin it again when it raises something that nobody foresaw.

    Anybody may have written what is in Redis, and it must not end a worker that serves all. Only LeaseLost and
    EngineError end the loop, and are raised. Each other error is logged once, with its traceback.
    """
    seen: set[str] = set()
    while True:
        try:
            return await loop()
        except (LeaseLost, EngineError):
            raise
        except Exception as error:
            if (text := f"{type(error).__name__}: {error}"[:500]) not in seen and len(seen) < 64:
                seen.add(text)
                log.exception("unforeseen, going on")
            await asyncio.sleep(RETRY_S)
