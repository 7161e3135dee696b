"""OpenAI's API: chat completions, completions, embeddings, models; and what vLLM's servers have beside it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from dataclasses import replace
from typing import Any

import orjson
from sse_starlette import EventSourceResponse
from starlette.background import BackgroundTask
from starlette.requests import Request as Http
from starlette.responses import Response
from starlette.routing import Route

from ...messages.errors import InvalidField, RolloutMQError
from ...messages.model import GenerateJob
from ...producer.calls import Delta
from ...producer.openai import Request, chat_request, completion_request, response, stream_chunks
from .exchange import Exchange, read_exchange
from .gateway import Gateway
from .refused import Refused
from .versions import check_versions, wait_s

Read = Callable[[Exchange], Coroutine[Any, Any, Request]]
MOST_WAIT_S = 600.0


class Events(EventSourceResponse):
    """An answer as server-sent events. However it ends, its source is closed."""

    def __init__(self, source: AsyncGenerator[dict[str, str]], headers: dict[str, str]) -> None:
        super().__init__(source, headers=headers, sep="\n")
        self._source = source

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._source.aclose()


def as_json(body: Any, status: int = 200, headers: dict[str, str] | None = None, then: Any = None) -> Response:
    """A JSON response. then: a coroutine function, awaited when it is sent."""
    task = BackgroundTask(then) if then is not None else None
    return Response(orjson.dumps(body), status, headers, "application/json", task)


class OpenAIDoor:
    """The handlers of a gateway's OpenAI API."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def routes(self) -> list[Route]:
        """All of them, also under /sessions/{session}."""
        posts = {
            "/v1/chat/completions": self.chat,
            "/v1/completions": self.completions,
            "/v1/embeddings": self.embeddings,
            "/tokenize": self.tokenize,
            "/detokenize": self.detokenize,
        }
        found = [Route(path, handler, methods=["POST"]) for path, handler in posts.items()]
        found += [Route("/v1/models", self.models, methods=["GET"])]
        inside = [Route("/sessions/{session}" + it.path, it.endpoint, methods=it.methods) for it in found]
        return [*found, *inside, Route("/v1/requests/{id}", self.request, methods=["GET", "DELETE"])]

    async def chat(self, http: Http) -> Response:
        """POST /v1/chat/completions."""
        return await self._generate(http, "chat")

    async def completions(self, http: Http) -> Response:
        """POST /v1/completions."""
        return await self._generate(http, "completion")
