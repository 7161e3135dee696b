"""A gateway of a test's pool, on this event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
from support.pools.pool import eventually

from rolloutmq.ops.gateway import Gateway, HttpLimits, HttpServer, Settings, application


@contextlib.asynccontextmanager
async def gateway(redis: str, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a gateway that serves as long as the block lasts. settings: fields of Settings."""
    limits = HttpLimits(drain_notice_s=0.0, drain_s=5)
    server = HttpServer(application(Gateway(Settings(redis, **settings))), "127.0.0.1", 0, limits=limits)
    task = asyncio.create_task(server.serve())
    await eventually(lambda: server.started or task.done())
    if task.done():
        task.result()
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=60) as client:
            yield client
    finally:
        server.should_exit = True
        await task
