"""Work beside what never rests: on a GPU that computes, in an interpreter whose main thread loops."""

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

    It holds for the whole process, as long as one thread is in such a block. docs/architecture.md says why.
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
    """What is queued inside goes to a new stream of `device`: it waits for nothing, and nothing waits for it.

    Whatever has to be ordered is ordered by events. Off CUDA nothing is changed.
    """
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        yield
