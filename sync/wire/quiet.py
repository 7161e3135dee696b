"""Keeps torch's own log off the terminal while a transfer's connections may break.

When a peer dies, torch prints a stack trace for every collective, from threads of its own. A dead worker is part of a
normal day, and the publisher's log names it in one line. Where this package's logger is at DEBUG, torch prints all.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
from collections.abc import Iterator
from threading import Lock, Timer

log = logging.getLogger(__name__)
FATAL = 3
LATE_S = 2.0
"""Torch's watchdog looks at its groups every tenth of a second."""
_lock = Lock()
_state = {"inside": 0, "before": 0}


@contextlib.contextmanager
def quiet_torch() -> Iterator[None]:
    """Let torch's C++ log print fatal errors only, in the whole process. Does nothing if torch has no such level."""
    by = 0 if log.isEnabledFor(logging.DEBUG) else 1
    _change(by)
    try:
        yield
    finally:
        _change(-by)


def quiet_torch_for_a_while() -> None:
    """Do the same for LATE_S from now on: a group is about to be aborted, and torch's watchdog will see it fail."""
    by = 0 if log.isEnabledFor(logging.DEBUG) else 1
    _change(by)
    later = Timer(LATE_S, _change, [-by])
    later.daemon = True
    later.start()


def _change(by: int) -> None:
    with contextlib.suppress(OSError, ValueError):
        level = ctypes.c_int.in_dll(ctypes.CDLL("libc10.so"), "FLAGS_caffe2_log_level")
        with _lock:
            if _state["inside"] == 0:
                _state["before"] = level.value
            _state["inside"] += by
            level.value = max(FATAL, _state["before"]) if _state["inside"] else _state["before"]
