"""OpenAI's API: chat completions, completions, models; and what vLLM's servers have beside it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from functools import partial
from typing import Any

import orjson
from sse_starlette import EventSourceResponse
from starlette.background import BackgroundTask
from starlette.requests import Request as Http
from starlette.responses import Response
from starlette.routing import Route

from ...messages.errors import InvalidField, RolloutMQError
from ...producer.calls import Delta
from ...producer.openai import Request, bytes_reader, chat_request, completion_request, response, stream_chunks
from .call import Call, read_call
from .errors import told
from .gateway import Gateway, Results, named
from .quotas import Admission
from .refused import Refused
from .versions import check_versions, wait_s

log = logging.getLogger(__name__)
PING_S = 15
"""A comment in a stream that is silent for so long, so that nothing between takes it for dead."""
Later = Callable[[], Any]


class Events(EventSourceResponse):
    """Server-sent events. However the response ends, their source is closed."""

    def __init__(self, source: AsyncGenerator[dict[str, str]], headers: dict[str, str]) -> None:
        super().__init__(source, headers=headers, sep="\n", ping=PING_S)
        self._source = source

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """ASGI's call."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._source.aclose()


def as_json(body: Any, status: int = 200, headers: dict[str, str] | None = None, then: Later | None = None) -> Response:
    """A JSON response. then: a coroutine function, awaited when it is sent."""
    task = BackgroundTask(then) if then is not None else None
    return Response(orjson.dumps(body), status, headers, "application/json", task)


class OpenAIDoor:
    """The handlers of a gateway's OpenAI API."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def routes(self) -> list[Route]:
        """All of them, those about a model also under /sessions/{session}."""
        posts = [
            Route("/v1/chat/completions", partial(self._generate, kind="chat"), methods=["POST"]),
            Route("/v1/completions", partial(self._generate, kind="completion"), methods=["POST"]),
        ]
        inside = [Route("/sessions/{session}" + it.path, it.endpoint, methods=["POST"]) for it in posts]
        models = [Route(path, self._models) for path in ("/v1/models", "/sessions/{session}/v1/models")]
        return [*posts, *inside, *models, Route("/v1/requests/{id}", self._request, methods=["GET", "DELETE"])]

    async def _generate(self, http: Http, kind: str) -> Response:
        gateway = self._gateway
        call = await read_call(http, gateway.tenants.of(http.scope["headers"]))
        http.state.tenant = call.tenant.name
        request = await self._read(call, kind)
        request = replace(request, jobs=tuple(gateway.job(call, job) for job in request.jobs))
        if call.body.get("weight_version") is not None:
            await call.unless_gone(check_versions(gateway.facts, request.jobs, wait_s(http.headers)))
        admission = await gateway.quotas.admit(call.tenant, _most(request))
        if call.body.get("enqueue"):
            return await self._enqueue(call, request, admission)
        try:
            if request.stream:
                return await self._stream(call, request, admission)
            results = await gateway.results(call, request.jobs)
        except BaseException:
            admission.settle(0)
            raise
        answer = await self._whole(_as_run(call, request), results)
        admission.settle(answer["usage"]["total_tokens"])
        return as_json(answer, headers=admission.headers, then=partial(gateway.delivered, call))

    async def _read(self, call: Call, kind: str) -> Request:
        """The request in a body. Raises InvalidField, and Refused for a model that is not here."""
        gateway = self._gateway
        model, adapters = await gateway.facts.model(), await gateway.facts.adapters()
        body = {"model": model.name} | call.body | {"session_id": call.session}
        if (said := body["model"]) not in model.names and str(said).rpartition(":")[2] not in adapters:
            here = ", ".join(sorted({model.name} | adapters.keys()))
            raise Refused(404, "model_not_found", f"The model {said!r} does not exist here: {here}.", param="model")
        if body.get("chat_template") is not None:
            raise InvalidField("chat_template", body["chat_template"], "absent: a template is a program")
        tokenizer = await gateway.tokenizer()
        more: dict[str, Any] = {"adapters": adapters, "record": call.session is not None}
        if kind == "completion":
            return completion_request(body, context_length=model.context or None, **more)
        if tokenizer is None:
            return chat_request(body, **more)
        render = gateway.texts.encode_chat
        more |= {"render": render, "context_length": model.context or None}
        return await asyncio.to_thread(chat_request, body, **more)

    async def _whole(self, request: Request, results: Results) -> dict[str, Any]:
        decode, token_bytes = await self._decoding()
        return response(request, results, decode, token_bytes)

    async def _stream(self, call: Call, request: Request, admission: Admission) -> Response:
        deltas = await self._gateway.stream(call, request.jobs)
        request = _as_run(call, request)
        return Events(self._events(call, request, deltas, admission), admission.headers)

    async def _events(
        self, call: Call, request: Request, deltas: AsyncGenerator[Delta], admission: Admission
    ) -> AsyncGenerator[dict[str, str]]:
        used = sum(job.token_ids.size for job in request.jobs if job.token_ids is not None)

        async def counted() -> AsyncGenerator[Delta]:
            nonlocal used
            async for delta in deltas:
                used += delta.token_ids.size
                yield delta

        try:
            try:
                async for chunk in stream_chunks(request, counted(), *await self._decoding()):
                    yield {"data": orjson.dumps(chunk).decode()}
            except RolloutMQError as error:
                yield {"data": told(error).body().decode()}
            yield {"data": "[DONE]"}
            await self._gateway.delivered(call)
        finally:
            await deltas.aclose()
            admission.settle(used)

    async def _enqueue(self, call: Call, request: Request, admission: Admission) -> Response:
        """Accept a request whose answer is fetched later."""
        gateway = self._gateway
        try:
            found = await gateway.begin(call, request.jobs)
        except BaseException:
            admission.settle(0)
            raise
        if found.state == "new":
            task = gateway.run(found, request.jobs)
            task.add_done_callback(lambda _: admission.settle())
        else:
            admission.settle(0)
        return as_json({"id": found.id, "object": "request", "status": "queued"}, 202, admission.headers)

    async def _request(self, http: Http) -> Response:
        """An enqueued request's answer, or its end."""
        raise Refused(404, "no_such_request", "not yet")

    async def _models(self, http: Http) -> Response:
        tenant = self._gateway.tenants.of(http.scope["headers"])
        http.state.tenant = tenant.name
        model, adapters = await self._gateway.facts.model(), await self._gateway.facts.adapters()
        one = {"object": "model", "created": 0, "owned_by": "rolloutmq", "max_model_len": model.context}
        own = [{"id": model.name, "root": model.path, "parent": None, **one}] if model.name else []
        found = own + [{"id": it, "root": it, "parent": model.name, **one} for it in sorted(adapters)]
        return as_json({"object": "list", "data": found})

    async def _decoding(self) -> tuple[Any, Any]:
        """How ids are shown: as text, where the gateway has the model's tokenizer."""
        tokenizer = await self._gateway.tokenizer()
        return (None, None) if tokenizer is None else (self._gateway.texts.decode, bytes_reader(tokenizer))


def _as_run(call: Call, request: Request) -> Request:
    """The request with the ids under which its jobs ran."""
    return request if call.request is None else replace(request, jobs=tuple(named(call.request, request.jobs)))


def _most(request: Request) -> int:
    """The most tokens that a request can cost."""
    prompts = sum(job.token_ids.size for job in request.jobs if job.token_ids is not None)
    return prompts + sum(job.n * job.sampling.max_new_tokens for job in request.jobs)
