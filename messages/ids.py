"""Job ids. They have a fixed length, because SGLang matches aborts by prefix. They sort by time, so streams, logs and
journals do too."""

from __future__ import annotations

import re
import secrets
import threading
import time

from .errors import InvalidField

_PATTERN = re.compile(r"[0-9a-f]{32}")
_CLIENT = re.compile(r"(?=.{1,128}$)([A-Za-z0-9_.-]+/)?[A-Za-z0-9_.-]+")


def new_id(now_ms: int | None = None) -> str:
    """32 hex digits in the layout of UUIDv7 (RFC 9562): 48 bits of Unix milliseconds, version, 74 random bits.

    Without `now_ms` the ids of one process ascend strictly, within a millisecond and even if the clock is set back.
    """
    global _last  # noqa: PLW0603 – one counter per process is the point
    if now_ms is None:
        with _lock:
            _last = max(_stamp(int(time.time() * 1000)), _last + 1)
            return f"{_last:032x}"
    return f"{_stamp(now_ms):032x}"


_lock = threading.Lock()
_last = 0


def derived_id(ms: int, seed: bytes) -> str:
    """An id in `new_id`'s layout that depends only on `ms` and the first 10 bytes of `seed`."""
    return f"{_stamp(ms, int.from_bytes(seed[:10], 'big')):032x}"


def _stamp(ms: int, bits: int | None = None) -> int:
    value = (ms & (1 << 48) - 1) << 80 | (secrets.randbits(80) if bits is None else bits)
    value = value & ~(0xF << 76) | 0x7 << 76
    return value & ~(0x3 << 62) | 0x2 << 62


def check_client_id(field: str, client_id: str) -> None:
    """Raises InvalidField for a text that cannot name a client and its reply stream.

    Clients with the same label, <label>/<name>, are one tenant: among tenants a pool gives jobs by turns.
    """
    if not _CLIENT.fullmatch(client_id):
        allowed = "1 to 128 letters, digits, '_', '.', '-', also behind a label: <label>/<name>"
        raise InvalidField(field, client_id, allowed)


def is_id(text: str) -> bool:
    """Whether `text` has the form of `new_id`."""
    return _PATTERN.fullmatch(text) is not None


def age_s(job_id: str, now: float) -> float | None:
    """How long ago a job's id was made, by its maker's clock; None for one that does not say a time of the last day.

    now: Unix seconds.
    """
    if not is_id(job_id) or job_id[12] != "7":
        return None
    age = now - int(job_id[:12], 16) / 1000
    return max(0.0, age) if -60.0 < age < 86400.0 else None
