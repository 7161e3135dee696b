"""The dashboard over HTTP: the page, its state, and the one thing that it can do, with a token."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import anyio
from sse_starlette import EventSourceResponse
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request as Http
from starlette.responses import FileResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from ...messages.errors import ConfigError
from ...messages.redis import PoolRedis
from ..http import HttpLimits, Refused, error_handlers
from ..journal import TextOf
from .history import History
from .hub import MOST_VIEWERS, as_json
from .live import LivePool
from .recent import Recent
from .rollouts import Rollouts, rows_of

PAGE = Path(__file__).with_name("page")
POLICY = "default-src 'self'; style-src 'self' 'unsafe-inline'; script-src 'self'; frame-ancestors 'none'"
HEADERS = [
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
]
LIMITS = HttpLimits(
    max_body_bytes=4096,
    max_connections=2 * MOST_VIEWERS,
    request_s=86_400.0,
    body_s=10.0,
    drain_notice_s=0.0,
    drain_s=2,
)
"""A stream of events may last for a day; then the browser asks for the next one."""
LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
LONGEST_TOKEN = 4096
NAMED = ("worker", "outcome")
Ask = Callable[..., Awaitable[Any]]


def _rows(history: History, limit: int, query: Mapping[str, str]) -> Mapping[str, Any]:
    version, named = _number("version", query.get("version", "")), {name: query.get(name, "") for name in NAMED}
    return rows_of(history, limit, query.get("before", ""), version=None if version is None else int(version), **named)


def read_token(file: Path) -> str:
    """The token in a file. Raises ConfigError for a file that others may read, or that has none."""
    try:
        mode = file.stat().st_mode
        token = file.read_bytes()[: LONGEST_TOKEN + 1].decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--token-file {file}: {error}") from None
    if mode & 0o007:
        raise ConfigError(
            f"--token-file {file}: mode {mode & 0o777:o}: others than its owner and group may not read it"
        )
    if not 16 <= len(token) <= LONGEST_TOKEN or not token.isprintable():
        raise ConfigError(f"--token-file {file}: a token of 16 to {LONGEST_TOKEN} printable characters is expected")
    return token


class Shield:
    """ASGI middleware: headers of every answer; and on loopback only this host's names, so that no page of another
    site reaches the server under a name of its own (DNS rebinding)."""

    def __init__(self, app: Any, hosts: frozenset[str] | None) -> None:
        self._app, self._hosts = app, hosts

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def told(message: Any) -> None:
            if message["type"] == "http.response.start":
                names = {name.lower() for name, _ in message["headers"]}
                message["headers"] = [*message["headers"], *(it for it in HEADERS if it[0] not in names)]
                if b"cache-control" not in names:  # the page's files have a tag
                    message["headers"].append((b"cache-control", b"no-cache" if b"etag" in names else b"no-store"))
            await send(message)

        host = Http(scope).headers.get("host", "")
        if self._hosts is not None and _name(host) not in self._hosts:
            refused = Refused(421, "misdirected", "This address is for the host itself; the Host header names another.")
            await refused(scope, receive, told)
            return
        await self._app(scope, receive, told)


def _name(host: str) -> str:
    return host[1 : host.index("]")] if host.startswith("[") and "]" in host else host.rpartition(":")[0] or host


def live_application(
    redis: PoolRedis,
    pool: str,
    host: str,
    *,
    token: str | None = None,
    journal: str | None = None,
    text_of: TextOf | None = None,
) -> Starlette:
    """A live pool's page, which reads as long as the application lives. token: lets who has it requeue jobs. journal:
    the trainer's. text_of: a token's text. Raises ConfigError for a journal without a folder."""
    recent = Recent(journal) if journal is not None else None
    live = LivePool(redis, pool, recent, can_act=token is not None)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(one.run()) for one in (live, recent) if one is not None]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def events(_: Http) -> Response:
        if live.hub.viewers >= MOST_VIEWERS:
            raise Refused(503, "overloaded", f"{MOST_VIEWERS} pages are open.", retry_after_s=10)
        return EventSourceResponse(live.hub.events(), sep="\n", ping=0, shutdown_event=anyio.Event())

    async def state(at: float | None, brief: bool) -> Any:
        return live.state(brief=brief)

    async def rows(limit: int, query: Mapping[str, str]) -> Any:
        outcome = query.get("outcome", "")
        if outcome == "waiting":
            return await live.waiting(limit)
        if recent is not None and outcome not in {"running", "dead", "failed"}:
            return await asyncio.to_thread(_rows, recent.history, limit, query)
        before = _number("before", query.get("before", "")) or math.inf
        return {"rows": await live.rows(limit, before, query.get("worker", ""), outcome)}

    async def rollout(job_id: str, sample: int) -> Any:
        found = None
        if recent is not None:
            found = await asyncio.to_thread(Rollouts(recent.folder, recent.history, text_of).one, job_id, sample)
        return found or await live.rollout(job_id)

    async def requeue(http: Http) -> Response:
        done = await live.requeue(await _asked_group(http, token))
        if done is None:
            raise Refused(404, "no_such_group", "No dead letters of this group are there any more.")
        return _json(done)

    routes = [Route("/events", events), Route("/requeue", requeue, methods=["POST"])]
    app = _application(host, (state, rows, rollout), routes, lifespan)
    app.state.live = live
    return app


def recorded_application(history: History, rollouts: Rollouts, host: str) -> Starlette:
    """The page of a recorded run."""

    async def requeue(_: Http) -> Response:
        raise Refused(403, "read_only", "A recorded run is only shown.")

    asks: tuple[Callable[..., Any], ...] = (history.state, partial(_rows, history), rollouts.one)
    state, rows, rollout = (partial(asyncio.to_thread, ask) for ask in asks)
    return _application(host, (state, rows, rollout), [Route("/requeue", requeue, methods=["POST"])], None)


def _application(
    host: str, source: tuple[Ask, Ask, Ask], more: list[Route], lifespan: Callable[..., Any] | None
) -> Starlette:
    """source: what the routes of state, rows and a rollout show."""
    ask_state, ask_rows, ask_rollout = source

    async def index(_: Http) -> Response:
        return FileResponse(PAGE / "index.html")

    async def health(_: Http) -> Response:
        return _json({"ready": True})

    async def state(http: Http) -> Response:
        at = _number("at", http.query_params.get("at", ""))
        return _json(await ask_state(at, brief=http.query_params.get("brief") == "1"))

    async def rows(http: Http) -> Response:
        limit = int(_number("limit", http.query_params.get("limit", "")) or 50)
        return _json(await ask_rows(max(1, min(limit, 500)), http.query_params))

    async def rollout(http: Http) -> Response:
        sample = int(_number("sample", http.query_params.get("sample", "")) or 0)
        if (found := await ask_rollout(http.path_params["job_id"], sample)) is None:
            raise Refused(404, "no_such_job", "Neither Redis nor a journal given here knows this job.")
        return _json(found)

    ours = {"/": index, "/health": health, "/state": state, "/rollouts": rows, "/rollout/{job_id}": rollout}
    routes = [Mount("/page", StaticFiles(directory=PAGE)), *(Route(path, it) for path, it in ours.items()), *more]
    shield = Middleware(Shield, hosts=LOOPBACK if host in LOOPBACK else None)
    return Starlette(routes=routes, middleware=[shield], lifespan=lifespan, exception_handlers=error_handlers())


async def _asked_group(http: Http, token: str | None) -> str:
    """The group that a request may requeue. Raises Refused.

    No page of another site can ask for it: a browser sends neither the token nor this content type on its own, and a
    foreign Origin is refused besides.
    """
    if token is None:
        raise Refused(403, "read_only", "Start the dashboard with --token-file to let it requeue jobs.")
    origin = http.headers.get("origin")
    if origin is not None and origin.partition("://")[2] != http.headers.get("host"):
        raise Refused(403, "foreign_origin", "The request comes from another site's page.")
    given = http.headers.get("authorization", "")
    if not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
        raise Refused(401, "invalid_token", "Authorization: Bearer TOKEN, with the token of --token-file.")
    if http.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise Refused(415, "content_type", "Content-Type: application/json")
    try:
        body = json.loads(await http.body())
    except (ValueError, RecursionError):
        body = None
    group = body.get("cause") if isinstance(body, dict) else None
    if not isinstance(group, str) or not 1 <= len(group) <= 64:
        raise Refused(400, "invalid_request", 'A body such as {"cause": "<id of a group>"} is expected.', param="cause")
    return group


def _number(name: str, text: str) -> float | None:
    if not text:
        return None
    with contextlib.suppress(ValueError):
        if math.isfinite(number := float(text)):
            return number
    raise Refused(400, "invalid_request", f"{name}={text[:40]!r}: a finite number is expected.", param=name)


def _json(value: Any) -> Response:
    return Response(as_json(value), media_type="application/json")
