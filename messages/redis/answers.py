"""Redis' refusals as one exception per meaning, for the wordings of all its versions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from redis.exceptions import (
    AskError,
    AuthenticationError,
    AuthorizationError,
    BusyLoadingError,
    ClusterDownError,
    MasterDownError,
    MovedError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TimeoutError,
    TryAgainError,
)

from ..errors import RedisRefused, RedisUnavailable
from .retry import NOT_READY

# Redis 6.2 wraps what a script's command was answered into text: "Error running script (call to f_…): … -OOM command
# not allowed …", which redis-py cannot tell from a mistake in the script. 7.x hands it on with its code in front.
_IN_SCRIPT = re.compile(r"^(?:ERR )?Error running script .*?: -([A-Z]+) ", re.DOTALL)
_CLASSES: dict[str, type[ResponseError]] = {
    "READONLY": ReadOnlyError,
    "MASTERDOWN": MasterDownError,
    "CLUSTERDOWN": ClusterDownError,
    "NOSCRIPT": NoScriptError,
    "UNBLOCKED": ReadOnlyError,  # a blocked read is thrown out when its primary becomes a replica
}
_CUT_OFF: dict[type[RedisError], str] = {
    BusyLoadingError: "LOADING",
    ReadOnlyError: "READONLY",
    MovedError: "MOVED",
    AskError: "ASK",
    TryAgainError: "TRYAGAIN",
    MasterDownError: "MASTERDOWN",
    ClusterDownError: "CLUSTERDOWN",
}
_REFUSALS = {
    "OOM": ("memory", "its memory limit (maxmemory) is reached"),
    "MISCONF": ("disk", "it cannot save its data to disk, see its log"),
    "NOREPLICAS": ("replicas", "fewer replicas than its min-replicas-to-write are connected"),
}


def meaning(error: ResponseError) -> ResponseError:
    """The exception for the meaning of `error`. It is `error` itself if redis-py found the right class."""
    text = str(error)
    if isinstance(error, OutOfMemoryError):
        code = "OOM"
    elif type(error) is not ResponseError:
        return error
    elif inside := _IN_SCRIPT.search(text):
        code = inside[1]
    else:
        code = text.partition(" ")[0]
    if code in _REFUSALS:
        reason, why = _REFUSALS[code]
        return RedisRefused(f"Redis takes no writes: {why}", reason)
    if code in _CLASSES:
        return _CLASSES[code](text)
    if "ttempted to access a non local key" in text:
        return TryAgainError(f"the pool's slot is being moved to another node: {text}")
    if "The user executing the script can't" in text or "ACL failure in script" in text:
        return NoPermissionError(text)
    return error


FULL = "max number of clients reached"
"""What Redis says to a connection for which it has no room, and to nothing that is sent over it."""
_NO_ROOM = (
    "Redis at {} takes no more connections: as many are open as its `maxclients` allows (10000 unless it was set; "
    "`CONFIG GET maxclients` and `INFO clients` tell). Raise it with `CONFIG SET maxclients N`, or end some clients or "
    "workers: an idle client has one connection, an idle worker three"
)
SILENT = "Look whether it is frozen or overloaded, whether a firewall is in between, and whether it is a Redis"
"""What to do about a server that takes connections and does not answer."""


@contextmanager
def told_as_ours(where: str) -> Iterator[None]:
    """Raise RedisUnavailable with the address for every error in the block that says Redis is absent or not ready.

    Refused credentials and permissions, and answers about the command itself, stay as they are.
    """
    try:
        yield
    except (RedisUnavailable, AuthenticationError, AuthorizationError):
        raise
    except NOT_READY as error:
        no_room = _NO_ROOM.format(where) if FULL in str(error) else ""
        silent = f". {SILENT}" if isinstance(error, TimeoutError) else ""
        raise RedisUnavailable(no_room or f"no answer from Redis at {where}: {said(error)}{silent}") from error


def said(error: Exception) -> str:
    """The error's text, with Redis' error code in front if the text lacks it."""
    text = str(error)
    # redis-py cuts the code off, and only since 8 keeps it anywhere.
    code = next((code for kind, code in _CUT_OFF.items() if isinstance(error, kind)), "")
    return f"{code} {text}" if code and not text.startswith(code) else text or type(error).__name__
