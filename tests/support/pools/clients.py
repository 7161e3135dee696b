"""What tests must know of a client that no caller sees: what has come, and who waits."""

from __future__ import annotations

from typing import Any


def _core(client: Any) -> Any:
    return getattr(client, "_it", client)._core


def arrived(client: Any) -> int:
    """Outcomes that a client has read and that nobody has taken."""
    return len(_core(client).inbox)


def waits(client: Any) -> int:
    """Calls that wait for an outcome."""
    found: int = _core(client).reader.waiting
    return found


async def crash(client: Any) -> None:
    """No acknowledgement, no goodbye."""
    reader = _core(client).reader
    for one in (reader._task, reader._ack_timer, reader._look_timer):
        if one is not None:
            one.cancel()
    await _core(client)._redis.aclose()
