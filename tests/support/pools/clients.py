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


def streams(client: Any) -> list[Any]:
    """The readers of its reply streams, one in each shard."""
    found: list[Any] = _core(client).reader.streams
    return found


async def flush(client: Any) -> None:
    """What may be acknowledged is acknowledged now."""
    for stream in streams(client):
        await stream._flush_acks()


async def crash(client: Any) -> None:
    """No acknowledgement, no goodbye."""
    for stream in streams(client):
        for one in (stream._task, stream._ack_timer, stream._look_timer):
            if one is not None:
                one.cancel()
    await _core(client)._redis.aclose()


async def close_unacknowledged(client: Any) -> None:
    """Nothing more reaches Redis."""
    for stream in streams(client):
        stream._before_ack = lambda _: False
    await client.aclose()
