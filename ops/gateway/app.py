"""The gateway as an ASGI application."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from redis.exceptions import RedisError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as Http
from starlette.responses import Response
from starlette.routing import Route

from ...messages.errors import RolloutMQError
from ..http import Refused, refusal
from .call import ClientGone
from .errors import told
from .gateway import Gateway
from .openai_door import OpenAIDoor, as_json

PAGE = Path(__file__).with_name("openapi.json")
GONE = 499
"""The status of a request whose client has hung up, as proxies log it."""
BLOCKED = (
    *("update_weights", "update_weights_from_disk", "update_weights_from_distributed", "update_weights_from_tensor"),
    *("stage_weight_update", "init_weights_update_group", "flush_cache", "pause_generation", "continue_generation"),
    *("abort_request", "load_lora_adapter", "unload_lora_adapter", "pause", "resume", "sleep", "wake_up"),
)
"""What trainers call on a server that is theirs alone. This pool is changed by its trainer and its operators."""


def application(gateway: Gateway) -> Starlette:
    """All routes of a gateway, which works as long as the application does."""

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with gateway.opened():
            yield

    async def health(_: Http) -> Response:
        reason = await gateway.facts.unready()
        if reason is not None:
            return as_json({"ready": False, "reason": reason}, 503)
        return as_json({"ready": True})

    async def page(_: Http) -> Response:
        return Response(PAGE.read_bytes(), media_type="application/json")

    async def blocked(http: Http) -> Response:
        name = http.url.path.rpartition("/")[2]
        text = f"{name} changes the pool for everybody: trainers publish weights, operators use `rolloutmq control`"
        return as_json({"error": {"type": "RouteBlocked", "message": text, "param": None, "code": 403}}, 403)

    routes = [
        Route("/health", health),
        Route("/openapi.json", page),
        *OpenAIDoor(gateway).routes(),
        *(Route(f"/{name}", blocked, methods=["POST"]) for name in BLOCKED),
    ]
    ours = (RolloutMQError, RedisError, OSError, TimeoutError, HTTPException, ClientGone)
    handlers: dict[Any, Any] = {**dict.fromkeys(ours, _answered), Exception: refusal}
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers)


async def _answered(_: Http, error: Exception) -> Response:
    if isinstance(error, ClientGone):
        return Response(status_code=GONE)
    if isinstance(error, HTTPException):
        error = Refused(error.status_code, "no_such_route", f"{error.detail}: see /openapi.json", headers=error.headers)
    return told(error).response
