"""A dashboard in the test's own process, and a browser's stream of events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from support.pools.pool import eventually

from rolloutmq.messages import connect
from rolloutmq.ops.dashboard import LIMITS, live_application
from rolloutmq.ops.http import HttpServer

TOKEN = "a-token-of-a-test"


@dataclass
class Dashboard:
    """A server, its reader of the pool, and a client of it."""

    server: HttpServer
    live: Any
    http: httpx.AsyncClient

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.port}"

    async def state(self) -> dict[str, Any]:
        return dict((await self.http.get("/state")).json())

    async def until(self, holds: Any, what: str = "") -> dict[str, Any]:
        """The first State of which `holds` is true."""
        found: dict[str, Any] = {}

        async def right() -> bool:
            found.update(await self.state())
            return bool(found.get("verdict") and holds(found))

        await eventually(right, what=what)
        return found

    @asynccontextmanager
    async def events(self) -> AsyncIterator[AsyncIterator[tuple[str, dict[str, Any]]]]:
        """Events as they come: kind and data."""
        async with self.http.stream("GET", "/events", timeout=60) as answer:
            assert answer.status_code == 200
            yield _events(answer)


async def _events(answer: httpx.Response) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    kind = ""
    async for line in answer.aiter_lines():
        if line.startswith("event: "):
            kind = line[7:]
        elif line.startswith("data: "):
            yield kind, json.loads(line[6:])


@asynccontextmanager
async def dashboard(
    url: str, token: str | None = None, journal: str | None = None, pool: str = "default"
) -> AsyncIterator[Dashboard]:
    """The dashboard of a live pool, until the block is left."""
    async with connect(url, pool=pool) as redis:
        app = live_application(redis, pool, "127.0.0.1", token=token, journal=journal)
        async with running(app) as (server, http):
            yield Dashboard(server, app.state.live, http)


@asynccontextmanager
async def running(app: Any) -> AsyncIterator[tuple[HttpServer, httpx.AsyncClient]]:
    """A server with this application, and a client of it."""
    server = HttpServer(app, "127.0.0.1", 0, limits=LIMITS)
    task = asyncio.create_task(server.serve())
    try:
        await eventually(lambda: server.started or task.done())
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=30) as http:
            yield server, http
    finally:
        server.drain(0.0)
        await task


def applied(state: Any, patch: Any) -> Any:
    """RFC 7386."""
    if not isinstance(patch, dict):
        return patch
    merged = dict(state) if isinstance(state, dict) else {}
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = applied(merged.get(name), value)
    return merged
