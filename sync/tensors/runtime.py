"""Lets a transfer's thread work beside a busy engine: short turns at Python's interpreter, a CUDA stream of its own."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator

import torch

SHORT_S = 20e-6
_lock = threading.Lock()
_users = 0
_before = 0.0


@contextlib.contextmanager
def short_turns() -> Iterator[None]:
    """Within this block threads take turns at the interpreter every 20 microseconds, instead of every 5 milliseconds.

    It holds for the whole process while any thread is in such a block. docs/architecture.md says why.
    """
    global _users, _before  # noqa: PLW0603 – the setting is the process's
    with _lock:
        if _users == 0:
            _before = sys.getswitchinterval()
            sys.setswitchinterval(min(_before, SHORT_S))
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0:
                sys.setswitchinterval(_before)


@contextlib.contextmanager
def side_stream(device: torch.device) -> Iterator[None]:
    """Queue what is queued inside this block on a new stream of `device`. It is not ordered with any other stream.

    Whatever has to be ordered is ordered by events. Does nothing if `device` is not CUDA.
    """
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        yield
