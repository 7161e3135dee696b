"""Job ids: fixed length and time-ordered.

Fixed length because SGLang matches aborts by prefix; time-ordered so that streams, logs and journals sort by time.
"""

from __future__ import annotations

import re
import secrets
import threading
import time

_PATTERN = re.compile(r"[0-9a-f]{32}")


def new_id(now_ms: int | None = None) -> str:
    """32 hex digits in the layout of UUIDv7 (RFC 9562): 48 bits of Unix milliseconds, version, 74 random bits.

    Ids made by one process at the clock's own time ascend strictly, within a millisecond and if the clock is set back.
    """
    global _last  # noqa: PLW0603 – one counter per process is the point
    if now_ms is None:
        with _lock:
            _last = max(_stamp(int(time.time() * 1000)), _last + 1)
            return f"{_last:032x}"
    return f"{_stamp(now_ms):032x}"


_lock = threading.Lock()
_last = 0


def _stamp(ms: int) -> int:
    value = (ms & (1 << 48) - 1) << 80 | secrets.randbits(80)
    value = value & ~(0xF << 76) | 0x7 << 76
    return value & ~(0x3 << 62) | 0x2 << 62


def is_id(text: str) -> bool:
    """Whether `text` has the form `new_id` gives."""
    return _PATTERN.fullmatch(text) is not None
