"""Ctrl-C in a thread that waits for the event loop of a blocking client."""

from __future__ import annotations

import asyncio
import contextlib
import linecache
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

from rolloutmq.producer.loop_thread import LoopThread


@contextlib.contextmanager
def interrupted_at(line: int) -> Iterator[None]:
    """Ctrl-C before the n-th line that this thread runs in LoopThread.run.

    Not before `return found`: CPython runs no signal handler between the assignment before it and the caller's own. Nor
    where a `with` is left: between the last call in it and `__exit__` it runs none either, or locks would stay taken.
    """
    left = [line]
    handed = list[FrameType]()
    entered = set[int]()  # lines of `with`: they come again when it is left

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        if frame.f_code is asyncio.BaseEventLoop.call_soon_threadsafe.__code__:
            handed.append(frame)
        if frame.f_code is not LoopThread.run.__code__:
            return None
        crossing = frame.f_locals.get("crossing")
        if event == "line" and frame.f_lineno not in entered and not (crossing is not None and crossing.received):
            if linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("with "):
                entered.add(frame.f_lineno)
            left[0] -= 1
            if left[0] == 0:
                if not handed:  # nobody would await it
                    frame.f_locals["work"].close()
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(None)
