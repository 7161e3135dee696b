"""The page and states of ours, over the routes of the dashboard's server, so that the page is tested by itself."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import rollouts
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.staticfiles import StaticFiles
from support.pools.pool import eventually

PAGE = Path(__file__).resolve().parents[3] / "ops" / "dashboard" / "page"
POLICY = "default-src 'self'; style-src 'self' 'unsafe-inline'; script-src 'self'; frame-ancestors 'none'"
TOKEN = "let-me"
IMPORT = re.compile(r'^import \{ [\w, ]+ \} from "\./(\w+\.js)";$', re.MULTILINE)
"""The one form of imports in the page's modules."""


class PageServer:
    """Serves a state, and what `tick` is given to every page that listens.

    `requests` has paths with their queries; `requeued` the causes that were asked for with the right token.
    """

    def __init__(self, state: dict[str, Any], frames: list[dict[str, Any]] | None = None) -> None:
        self.state, self.frames = state, frames or []
        self.rollouts: dict[str, dict[str, Any]] = {}
        self.rows = rollouts.rows()
        self.requests: list[str] = []
        self.requeued: list[str] = []
        self._listening: set[asyncio.Queue[bytes]] = set()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    @property
    def listeners(self) -> int:
        return len(self._listening)

    def tick(self, tick: dict[str, Any]) -> None:
        self._send(_event("tick", tick))

    def _send(self, data: bytes) -> None:
        for queue in list(self._listening):
            self._loop.call_soon_threadsafe(queue.put_nowait, data)

    @contextmanager
    def running(self) -> Iterator[PageServer]:
        """Serve until the block ends; again and again on the same port."""
        config = uvicorn.Config(self._app(), "127.0.0.1", self.port, log_level="error", timeout_graceful_shutdown=5)
        server, started = uvicorn.Server(config), threading.Event()

        async def serve() -> None:
            self._loop = asyncio.get_running_loop()
            task = asyncio.create_task(server.serve())
            await eventually(lambda: server.started)
            started.set()
            await task

        thread = threading.Thread(target=asyncio.run, args=(serve(),))
        thread.start()
        started.wait()
        try:
            yield self
        finally:
            self._send(b"")
            server.should_exit = True
            thread.join()

    def _app(self) -> Starlette:
        gets = {
            "/": self._index,
            "/events": self._events,
            "/state": self._state,
            "/rollouts": self._rows,
            "/rollout/{job}": self._rollout,
        }
        routes = [Route(path, endpoint) for path, endpoint in gets.items()]
        app = Starlette(routes=[*routes, Route("/requeue", self._requeue, methods=["POST"])])
        app.mount("/page", StaticFiles(directory=PAGE))
        app.add_middleware(_Guard, server=self)
        return app

    async def _index(self, _: Request) -> Response:
        return Response((PAGE / "index.html").read_text(), media_type="text/html")

    async def _events(self, _: Request) -> Response:
        queue: asyncio.Queue[bytes] = asyncio.Queue()

        async def told() -> AsyncIterator[bytes]:
            self._listening.add(queue)
            try:
                yield _event("snapshot", self.state)
                while data := await queue.get():
                    yield data
            finally:
                self._listening.discard(queue)

        return StreamingResponse(told(), media_type="text/event-stream")

    async def _state(self, request: Request) -> Response:
        at, brief = float(request.query_params.get("at", "inf")), "brief" in request.query_params
        state = next((it for it in reversed(self.frames) if it["at"] <= at), self.state)
        return JSONResponse({name: it for name, it in state.items() if not (brief and name in ("lanes", "series"))})

    async def _rows(self, request: Request) -> Response:
        asked = request.query_params
        found = [
            row
            for row in self.rows
            if row["at"] < float(asked.get("before", "inf")) and asked.get("worker", "") in row["worker"]
        ]
        found = [row for row in found if asked.get("outcome", "") in ("", row["fate"], row["state"])]
        return JSONResponse({"rows": found[:50]})

    async def _rollout(self, request: Request) -> Response:
        job = request.path_params["job"]
        if job == "gone":
            return JSONResponse({"error": {"message": f"there is no job {job!r}"}}, 404)
        return JSONResponse(self.rollouts.get(job) or rollouts.rollout(job, int(request.query_params.get("sample", 0))))

    async def _requeue(self, request: Request) -> Response:
        if request.headers.get("authorization") != f"Bearer {TOKEN}":
            return JSONResponse({"error": {"message": "the token is another one"}}, 401)
        self.requeued.append((await request.json())["cause"])
        return JSONResponse({"requeued": 180})


class _Guard:
    """Notes requests, and sets the policy that the dashboard's server sets."""

    def __init__(self, app: Any, server: PageServer) -> None:
        self.app, self.server = app, server

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            self.server.requests.append(f"{scope['path']}?{scope['query_string'].decode()}")

        async def guarded(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"content-security-policy", POLICY.encode())]
            await send(message)

        await self.app(scope, receive, guarded)


def exported(run: dict[str, Any]) -> str:
    """The page as one file, with this run in it: what `--export` writes, without its policy."""
    done: list[str] = []
    parts: list[str] = []

    def follow(name: str) -> None:
        if name in done:
            return
        done.append(name)
        text = (PAGE / name).read_text()
        for needed in IMPORT.findall(text):
            follow(needed)
        parts.append(re.sub(r"^export ", "", IMPORT.sub("", text), flags=re.MULTILINE))

    follow("main.js")
    data = json.dumps(run).replace("<", "\\u003c")
    script = f'<script type="application/json" id="run">{data}</script><script type="module">{"".join(parts)}</script>'
    page = (PAGE / "index.html").read_text().replace('<link rel="icon" href="page/icon.svg">\n', "")
    page = page.replace(
        '<link rel="stylesheet" href="page/page.css">', f"<style>{(PAGE / 'page.css').read_text()}</style>"
    )
    return page.replace('<script type="module" src="page/main.js"></script>', script)


def _event(name: str, data: dict[str, Any]) -> bytes:
    return f"event: {name}\ndata: {json.dumps(data)}\n\n".encode()
