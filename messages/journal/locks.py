"""Locks on segments: they say whether a writer is there. The kernel ends them with the writer's process."""

from __future__ import annotations

import fcntl
import time
from pathlib import Path
from typing import Any

LOCK_TRIES, LOCK_S = 100, 0.001


def lock(file: Any) -> None:
    """Hold a lock on a segment. Whoever asks whether it is left may hold it for a moment."""
    for _ in range(LOCK_TRIES):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(LOCK_S)
        except OSError:  # a filesystem without locks: then no other process takes it for left
            return
        else:
            return


def is_held(path: Path) -> bool | None:
    """Whether somebody still writes to a segment. None: nobody knows, the file is gone or there are no locks."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False
