"""The gateway as an ASGI application."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request as Http
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ..http import error_handlers
from .call import ClientGone
from .control import Control
from .door import as_json
from .errors import told
from .gateway import Gateway
from .openai_door import OpenAIDoor
from .sglang import SGLangDoor
from .vllm import VLLMDoor

PAGE = Path(__file__).with_name("openapi.json")
GONE = 499
"""The status of a request whose client has hung up, as proxies log it."""
TENANT = "/t/"
"""Such a path begins with a tenant's key, for trainers that send none: /t/KEY/v1/models."""
BLOCKED = ("stage_weight_update", "update_weights_from_tensor", "update_weights_from_ipc")
"""What brings weights that only the trainer's own host could read, or that would have to be unpickled."""


def application(gateway: Gateway) -> Starlette:
    """All routes of a gateway, which works as long as the application does."""

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with gateway.opened():
            yield

    async def health(http: Http) -> Response:
        reason = await gateway.unready(http.scope["headers"])
        if reason is not None:
            return as_json({"ready": False, "reason": reason}, 503)
        return as_json({"ready": True})

    async def page(_: Http) -> Response:
        return Response(PAGE.read_bytes(), media_type="application/json")

    async def blocked(http: Http) -> Response:
        name = http.url.path.rpartition("/")[2]
        text = f"{name}: weights come to a gateway in folders, or as a broadcast; trainers in Python publish them."
        return as_json({"error": {"type": "RouteBlocked", "message": text, "param": None, "code": 403}}, 403)

    control = Control(gateway)
    routes = [
        Route("/health", health),
        Route("/health_generate", health),
        Route("/openapi.json", page),
        *OpenAIDoor(gateway).routes(),
        *SGLangDoor(gateway, control).routes(),
        *VLLMDoor(gateway, control).routes(),
        *(Route(f"/{name}", blocked, methods=["POST"]) for name in BLOCKED),
    ]
    handlers = error_handlers(told) | {ClientGone: _gone}
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers, middleware=[Middleware(KeyInPath)])


class KeyInPath:
    """ASGI middleware: /t/KEY/... is the rest of it, with that key, whatever key is sent beside it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI's call."""
        if scope["type"] == "http" and scope["path"].startswith(TENANT):
            key = scope["path"].removeprefix(TENANT).partition("/")[0]
            others = [it for it in scope["headers"] if it[0] not in {b"authorization", b"x-api-key"}]
            bearer = (b"authorization", f"Bearer {key}".encode(errors="replace"))
            scope.update(headers=[*others, bearer], root_path=f"{TENANT}{key}")
        await self._app(scope, receive, send)


async def _gone(_: Http, __: Exception) -> Response:
    return Response(status_code=GONE)
