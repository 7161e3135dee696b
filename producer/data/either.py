"""Calls of a caller's function, which may be a coroutine function or a plain one that blocks."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Awaitable, Callable
from typing import Any

GRACE_S = 30.0
"""How long a coroutine that was cancelled is waited for, in seconds. Then it is left behind."""


async def call_either(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a coroutine function on the event loop, and a plain function in a thread of its own; returns its answer.

    A coroutine runs in a task of its own. If the caller is cancelled it is, too, and has `GRACE_S` to end. A plain
    function cannot be stopped: it runs on in its thread, and its answer is dropped. What would end a thread, a task, a
    loop or an iteration is raised as a RuntimeError; see `as_error`.
    """
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None)):  # noqa: B004
        return await _in_a_task(function(*args, **kwargs))
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
            error = as_error(raised)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(finish, answer, error)

    # Not the loop's own pool: functions that hang would fill it, and the process could not end.
    threading.Thread(target=work, name=f"rolloutmq-{getattr(function, '__name__', 'call')}", daemon=True).start()
    answer = await done
    return await _in_a_task(answer) if inspect.isawaitable(answer) else answer


def as_error(raised: BaseException) -> Exception:
    """The error; or a RuntimeError in place of SystemExit, CancelledError and their kind, which somebody's function has
    no right to raise here. Ctrl-C comes on the main thread, and is raised again."""
    if isinstance(raised, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
        raise raised
    if isinstance(raised, Exception) and not isinstance(raised, StopIteration):  # which no future takes
        return raised
    return RuntimeError(told(raised))


def told(error: BaseException) -> str:
    """The kind of an error, and its text unless that raises, too: errors may be of somebody's own making."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__


async def _in_a_task(work: Awaitable[Any]) -> Any:
    async def guarded() -> Any:
        try:
            return await work
        except (SystemExit, KeyboardInterrupt) as raised:  # which a task hands on to its loop
            raise as_error(raised) from raised

    task = asyncio.create_task(guarded())
    task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # of one that was left behind, too
    try:
        await asyncio.wait({task})
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait({task}, timeout=GRACE_S)
        raise
    try:
        return task.result()
    except Exception:
        raise
    except BaseException as raised:  # CancelledError, too: nobody has cancelled it
        raise as_error(raised) from raised
