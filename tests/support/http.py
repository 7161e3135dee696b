"""A small application behind the gateway's server, and raw connections to it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from support.pools.pool import eventually

from rolloutmq.ops.http import HttpLimits, HttpServer, Refused, Tls, error_handlers


async def length(request: Request) -> Response:
    return JSONResponse({"length": len(await request.body())})


class Held:
    """/held: answers once it is let go, and knows who hung up. /events: ten of them, or, with ?endless, one and then
    none. /health: also how many of these run."""

    def __init__(self) -> None:
        self.running = self.hung_up = 0
        self.let_go = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.running += 1
        waits = asyncio.create_task(self.let_go.wait())
        hears = asyncio.create_task(self._hang_up(receive))
        try:
            await asyncio.wait({waits, hears}, return_when=asyncio.FIRST_COMPLETED)
            if hears.done():
                self.hung_up += 1
            else:
                await JSONResponse({"held": True})(scope, receive, send)
        finally:
            self.running -= 1
            waits.cancel()
            hears.cancel()

    async def events(self, request: Request) -> Response:
        async def told() -> AsyncIterator[bytes]:
            self.running += 1
            try:
                for number in range(10):
                    yield b"data: %d\n\n" % number
                    if "endless" in request.query_params:
                        await asyncio.Event().wait()
            finally:
                self.running -= 1

        return StreamingResponse(told(), media_type="text/event-stream")

    async def health(self, _: Request) -> Response:
        return JSONResponse({"ready": True}, headers={"x-running": str(self.running)})

    async def _hang_up(self, receive: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass


async def large(_: Request) -> Response:
    return Response(b"x" * (64 << 20))


async def refuses(_: Request) -> Response:
    raise Refused(409, "conflict", "Not now.", retry_after_s=2)


async def fails(_: Request) -> Response:
    raise RuntimeError("what the log says, and the answer does not")


def application(held: Held) -> Starlette:
    posted = {"/v1/chat/completions": length, "/events": held.events, "/refuses": refuses, "/fails": fails}
    routes = [Route(path, endpoint, methods=["POST", "GET"]) for path, endpoint in posted.items()]
    routes += [Route("/health", held.health), Route("/large", large), Route("/held", endpoint=held)]
    return Starlette(routes=routes, exception_handlers=error_handlers())


@dataclass
class Running:
    server: HttpServer
    held: Held

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.port}"

    async def connection(self) -> Connection:
        return Connection(*await asyncio.open_connection("127.0.0.1", self.server.port))


class Connection:
    """Bytes to a server, and what it answers."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self) -> tuple[int, dict[str, str], Any]:
        """Status, headers and body (of JSON, decoded) of the next answer; status 0 if the connection is closed."""
        try:
            head = await self.reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            return 0, {}, b""
        first, *lines = head.decode().rstrip().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        body: Any = await self.reader.readexactly(int(headers.get("content-length", 0)))
        return int(first.split()[1]), headers, json.loads(body) if "json" in headers.get("content-type", "") else body

    async def closed(self) -> bool:
        """Whether the server closes it; what it still sends is read."""
        with contextlib.suppress(ConnectionError):
            while await self.reader.read(1 << 16):
                pass
        return True


@contextlib.asynccontextmanager
async def served(limits: HttpLimits | None = None, tls: Tls | None = None) -> AsyncIterator[Running]:
    held = Held()
    server = HttpServer(application(held), "127.0.0.1", 0, limits=limits, tls=tls)
    task = asyncio.create_task(server.serve())
    await eventually(lambda: server.started)
    try:
        yield Running(server, held)
    finally:
        server.should_exit = True
        held.let_go.set()
        await task
