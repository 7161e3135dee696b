"""Job ids: fixed length and time-ordered.

Fixed length because SGLang matches aborts by prefix; time-ordered so that streams, logs and journals sort by time.
"""

from __future__ import annotations

import re
import secrets
import time

ID_LENGTH = 32
_PATTERN = re.compile(r"[0-9a-f]{32}")


def new_id(now_ms: int | None = None) -> str:
    """32 hex digits in the layout of UUIDv7 (RFC 9562): 48 bits of Unix milliseconds, version, 74 random bits."""
    ms = int(time.time() * 1000) if now_ms is None else now_ms
    value = (ms & (1 << 48) - 1) << 80 | secrets.randbits(80)
    value = value & ~(0xF << 76) | 0x7 << 76
    value = value & ~(0x3 << 62) | 0x2 << 62
    return f"{value:032x}"


def is_id(text: str) -> bool:
    """Whether `text` has the form `new_id` gives."""
    return _PATTERN.fullmatch(text) is not None
