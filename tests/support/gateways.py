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
async def server(redis: str, **settings: Any) -> AsyncIterator[HttpServer]:
    """A gateway that serves as long as the block lasts. settings: fields of Settings."""
    limits = HttpLimits(drain_notice_s=0.0, drain_s=5)
    here = HttpServer(application(Gateway(Settings(redis, **settings))), "127.0.0.1", 0, limits=limits)
    task = asyncio.create_task(here.serve())
    await eventually(lambda: here.started or task.done())
    if task.done():
        task.result()
    try:
        yield here
    finally:
        here.should_exit = True
        await task


@contextlib.asynccontextmanager
async def gateway(redis: str, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of one."""
    async with (
        server(redis, **settings) as here,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{here.port}", timeout=60) as client,
    ):
        yield client
