"""Calls of a caller's function, which may be a coroutine function or a plain one that blocks."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Callable
from typing import Any


async def call_either(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a coroutine function on the event loop, and a plain function in a thread of its own; returns its answer.

    A plain function cannot be stopped. If the caller is cancelled, it runs on in its thread and its answer is dropped.
    What ends a thread or an iteration (SystemExit, StopIteration) is raised as a RuntimeError.
    """
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None)):  # noqa: B004
        return await function(*args, **kwargs)
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def finish(answer: Any, error: Exception | None) -> None:
        if done.cancelled():
            return
        if error is None:
            done.set_result(answer)
        else:
            done.set_exception(error)

    def work() -> None:
        answer: Any = None
        error: Exception | None = None
        try:
            answer = function(*args, **kwargs)
        except BaseException as raised:
            if isinstance(raised, Exception) and not isinstance(raised, StopIteration):  # which no future takes
                error = raised
            else:
                error = RuntimeError(f"{type(raised).__name__}: {raised}")
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(finish, answer, error)

    # Not the loop's own pool: functions that hang would fill it, and the process could not end.
    threading.Thread(target=work, name=f"rolloutmq-{getattr(function, '__name__', 'call')}", daemon=True).start()
    answer = await done
    return await answer if inspect.isawaitable(answer) else answer
