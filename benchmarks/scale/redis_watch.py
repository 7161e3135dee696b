"""What a run costs Redis: its CPU time, its memory, and its slowest call by name."""

from __future__ import annotations

import hashlib
from typing import Any

from rolloutmq.messages.scripts import script_names, script_source

from ..parts import busy_s

SLOW_US = 1000
"""Calls that take longer are kept in Redis' slow log."""
KEPT = 4096


class RedisWatch:
    """Redis from `begin` to `figures`."""

    def __init__(self, admin: Any) -> None:
        self._admin = admin
        self._before = 0.0

    async def begin(self) -> None:
        """Count from here."""
        await self._admin.config_set("slowlog-log-slower-than", SLOW_US)
        await self._admin.config_set("slowlog-max-len", KEPT)
        await self._admin.slowlog_reset()
        self._before = await self.cpu_s()

    async def cpu_s(self) -> float:
        """CPU seconds of the server since it started."""
        return busy_s(await self._admin.info("cpu"))

    async def spent_s(self) -> float:
        """CPU seconds since `begin`."""
        return await self.cpu_s() - self._before

    async def figures(self) -> dict[str, Any]:
        """Memory, and the calls that took longer than SLOW_US: how many, and the slowest of each script."""
        texts = {name: script_source(name).encode() for name in script_names()}
        shas = {hashlib.sha1(text, usedforsecurity=False).hexdigest(): name for name, text in texts.items()}
        slowest: dict[str, float] = {}
        log = await self._admin.slowlog_get(KEPT)
        for entry in log:
            words = bytes(entry["command"]).decode(errors="replace").split(" ", 2)
            name = shas.get(words[1], "a script") if words[0] == "EVALSHA" and len(words) > 1 else words[0]
            slowest[name] = max(slowest.get(name, 0.0), entry["duration"] / 1000)
        memory = await self._admin.info("memory")
        return {
            "memory_mb": round(memory["used_memory_peak"] / 1e6, 1),
            "calls_over_1_ms": len(log),
            "slowest_ms": dict(sorted(slowest.items(), key=lambda one: -one[1])),
        }
