"""Runs the Lua scripts: every change to a pool's state is one of them, so it happens whole or not at all.

Every script is idempotent: redis-py re-sends a command whose reply was lost, and the second run must change nothing.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

from redis.asyncio import Redis
from redis.commands.core import AsyncScript

from .keys import Keys


@cache
def script_source(name: str) -> str:
    """The text sent to Redis: the shared functions, then the script."""
    folder = files(__package__) / "scripts"
    return (folder / "lib.lua").read_text() + "\n" + (folder / f"{name}.lua").read_text()


class Scripts:
    """The scripts of one pool over one connection pool. Loaded by SHA, sent whole again after a Redis restart."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._redis = redis
        self._keys = keys
        self._loaded: dict[str, AsyncScript] = {}

    async def run(self, name: str, *args: str | int | float | bytes) -> Any:
        """Run `<name>.lua` with the pool's prefix before `args`."""
        script = self._loaded.get(name)
        if script is None:
            script = self._loaded[name] = self._redis.register_script(script_source(name))
        return await script(keys=[self._keys.load], args=[self._keys.prefix, *args])
