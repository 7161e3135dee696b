"""How a call learns that a write is on the server's disk: `?durable=disk`.

Redis answers a write when it is in memory. The append-only file gets it later, and the disk later still. From Redis 7.2
on, and in Valkey, WAITAOF waits until the file with the connection's last write was flushed (fsync). An older server
cannot tell. There it is enough that the server flushes before every answer, so its settings are read after each write.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from redis.asyncio import Redis
from redis.exceptions import NoPermissionError, ReadOnlyError, ResponseError

from ..errors import RedisRefused

FLUSH_TIMEOUT_MS = 1500
"""The longest time for one WAITAOF: with its script and a WAIT for replicas it must fit into the time for one reply."""
_FLUSHES_FIRST = {b"appendonly": b"yes", b"appendfsync": b"always", b"no-appendfsync-on-rewrite": b"no"}
_OR = "Or leave ?durable= out of the URL: then an accepted job may be lost if the server is killed"


class Flush(NamedTuple):
    """The command to send behind a write, on the same connection, and whether it waits for the disk."""

    command: tuple[str | int, ...]
    waits: bool

    def done(self, answer: Any) -> bool:
        """Whether the write is on disk, by the answer to the command."""
        if self.waits:
            return int(answer[0]) >= 1
        return _FLUSHES_FIRST.items() <= dict(zip(answer[::2], answer[1::2], strict=True)).items()


_SETTINGS = Flush(("CONFIG", "GET", "*append*"), waits=False)


async def how_to_flush(redis: Redis) -> Flush:
    """How to see that a write is on this server's disk.

    Raises RedisRefused with the reason "durable" and what to do if this server cannot promise that a write is on its
    disk.
    """
    try:
        await redis.execute_command("WAITAOF", 1, 0, 1)  # type: ignore[no-untyped-call]
    except NoPermissionError as error:
        raise _refused("this user may not run WAITAOF. Give it +waitaof") from error
    except ResponseError as error:
        if type(error) is not ResponseError:
            raise
        if "replica" in str(error):
            raise ReadOnlyError(str(error)) from error
        if "unknown command" not in str(error).lower():
            raise _refused(f"{error} Set `appendonly yes`") from error
        return await _by_settings(redis)
    return Flush(("WAITAOF", 1, 0, FLUSH_TIMEOUT_MS), waits=True)


async def _by_settings(redis: Redis) -> Flush:
    try:
        answer = await redis.execute_command(*_SETTINGS.command)  # type: ignore[no-untyped-call]
    except NoPermissionError as error:
        raise _refused(
            "this server has no WAITAOF (Redis has it from 7.2 on), and this user may not read whether the server "
            "flushes before it answers. Give it +config|get (6.2: +config)"
        ) from error
    if not _SETTINGS.done(answer):
        wanted = ", ".join(f"`{name.decode()} {value.decode()}`" for name, value in _FLUSHES_FIRST.items())
        raise _refused(f"this server has no WAITAOF. Use Redis 7.2 or newer, or Valkey, or set {wanted}")
    return _SETTINGS


def _refused(why: str) -> RedisRefused:
    return RedisRefused(f"durable=disk: {why}. {_OR}", "durable")
