"""Runs an operation in this process: for an RQ job, or for a command that does not need RQ."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from ..redis import connected
from ..terminal import ProgressLine
from .catalog import Context, checked

Report = Callable[[dict[str, Any]], None]


async def run_operation(
    name: object, params: object, *, redis_url: str, pool: str, report: Report, notes: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Check, connect, run; returns the operation's result. Raises RolloutMQError, or what the operation raises."""
    chosen, settings = checked(name, params)
    async with connected(redis_url, pool, patient=True) as redis:
        return await chosen.run(Context(redis, pool, report, dict(notes or {}), redis_url), **dict(settings))


def run_here(name: str, params: dict[str, Any], redis_url: str, pool: str) -> dict[str, Any]:
    """`run_operation` for a command, with its progress on stderr."""
    with ProgressLine() as line:
        return asyncio.run(run_operation(name, params, redis_url=redis_url, pool=pool, report=line.report))
