"""What every door does with a request: its body becomes one of OpenAI's, and OpenAI's answer becomes its own."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import anyio
import orjson
from redis.exceptions import RedisError
from sse_starlette import EventSourceResponse
from starlette.background import BackgroundTask
from starlette.requests import Request as Http
from starlette.responses import Response
from starlette.routing import Route

from ...messages.errors import InvalidField, JobFailed, RolloutMQError
from ...messages.model import GenerateJob, JobFailure, RolloutResult
from ...producer.calls import Delta
from ...producer.openai import (
    Render,
    Request,
    bytes_reader,
    chat_request,
    completion_request,
    response,
    stream_chunks,
    switch,
)
from ..http import Refused, refused_of
from .call import Call, body_of, read_call
from .errors import told
from .gateway import OWNER, Gateway
from .pool_gateway import PoolGateway, named
from .tenants import Tenant
from .versions import check_versions, wait_s, watch_versions

PROMPTS = frozenset(
    {"messages", "prompt", "input_ids", "continue_final_message", "add_generation_prompt", "chat_template_kwargs"}
)
"""What of a body says nothing of how its answer is shown."""
PING_S = 15
"""A comment in a stream that is silent for so long, so that nothing between takes it for dead."""
STOPPED = "stopped before it ran"
"""The cause of a job without a token that was ended early (Broker.stop): its answer is an empty one, and no error."""
Kind = Literal["chat", "completion"]
Later = Callable[[], Any]
Handler = Callable[[Tenant, dict[str, Any]], Awaitable[Any]]
"""handler(who asks, the body): the answer, as JSON or a Response."""
Decode = tuple[Any, Any]
"""How ids are shown: as text, and a token's bytes; both None where the gateway does not have the model's tokenizer."""


@dataclass(frozen=True, slots=True)
class Answered:
    """What came of a request. results: of each of its jobs, None for a sample that never began."""

    call: Call
    request: Request
    results: Sequence[Sequence[RolloutResult | None]]
    decode: Decode

    def openai(self) -> dict[str, Any]:
        """OpenAI's answer."""
        return response(self.request, self.results, *self.decode)


@dataclass(frozen=True, slots=True)
class Form:
    """How a route is asked, and how it answers.

    read(body): the kind of OpenAI's body that is meant, and that body. show(answered): the route's answer.
    stream(call, request, deltas, decode): the data of its events. defaults: whether operators' defaults are for it.
    abort: the finish reason of a sample that was ended early.
    """

    read: Callable[[dict[str, Any]], tuple[Kind, dict[str, Any]]]
    show: Callable[[Answered], Any]
    stream: Callable[[Call, Request, AsyncIterator[Delta], Decode], AsyncIterator[Any]]
    defaults: bool = False
    abort: str = "abort"


class Events(EventSourceResponse):
    """Server-sent events. However the response ends, their source is closed."""

    def __init__(self, source: AsyncGenerator[bytes], call: Call) -> None:
        # Left alone, it ends all streams when the server begins to leave, which gives requests time to end.
        grace = float("inf")
        super().__init__(source, sep="\n", ping=PING_S, shutdown_event=anyio.Event(), shutdown_grace_period=grace)
        self._source, self._call = source, call

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """ASGI's call."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._source.aclose()
            if self._call.leave is not None:  # where the source never began
                self._call.leave()


def event(data: bytes) -> bytes:
    """One server-sent event. data: a line."""
    return b"data: " + data + b"\n\n"


def as_json(body: Any, status: int = 200, then: Later | None = None) -> Response:
    """A JSON response. then: a coroutine function, awaited when it is sent."""
    task = BackgroundTask(then) if then is not None else None
    return Response(orjson.dumps(body), status, media_type="application/json", background=task)


def chunks_of(_: Call, request: Request, deltas: AsyncIterator[Delta], decode: Decode) -> AsyncIterator[Any]:
    """OpenAI's chunks, as `Form.stream` gives them."""
    return stream_chunks(request, deltas, *decode)


class Door:
    """The handlers of one API. `gateway` has what they share."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway

    async def generate(self, http: Http, form: Form) -> Response:
        """Answer a request that generates."""
        call = await read_call(http, self.gateway.tenants, self.gateway.settings.defaults if form.defaults else {})
        kind, body = form.read(call.body)
        pool, request = await self._read(call, kind, body)
        request = replace(request, abort=form.abort)
        later = switch(call.body, "enqueue")
        if body.get("weight_version") is not None:
            await call.unless_gone(check_versions(pool.facts, request.jobs, wait_s(http.headers)))
            call.watch = partial(watch_versions, pool.facts, request.jobs)
        call.key, call.most = call.key or (secrets.token_hex(16) if later else None), _most(call, request)
        await pool.begin(call, request.jobs)
        if later and call.request is not None:
            if call.request.state == "new":
                pool.run(call, request.jobs)
            return as_json({"id": call.request.id, "object": "request", "status": "queued"}, 202)
        if request.stream:
            deltas = await pool.stream(call, request.jobs)
            return Events(self._events(pool, call, form, as_run(call, request), deltas), call)
        results = await _or_none(pool.results(call, request.jobs), request)
        answer = form.show(Answered(call, as_run(call, request), results, await decoding(pool)))
        await self.gateway.quotas.told(call.tenant)
        return as_json(answer, then=partial(pool.delivered, call))

    async def _read(self, call: Call, kind: Kind, given: dict[str, Any]) -> tuple[PoolGateway, Request]:
        """The pool that is to serve a body, and the request in it. Raises InvalidField, Refused."""
        said = given.get("model")
        if said is not None and not isinstance(said, str):
            raise InvalidField("model", said, "a text")
        pool, model, adapters = await self.gateway.serving(call.tenant, said)
        body = given | {"model": model.name if said is None else said, "session_id": call.session}
        check_template(body)
        if type(body.get("seed")) is int and not await pool.facts.honours("seed"):
            del body["seed"]  # OpenAI's is best effort, too
        try:
            call.about = orjson.dumps({"kind": kind} | {name: it for name, it in body.items() if name not in PROMPTS})
        except TypeError as error:  # it reads what is deeper than it writes
            raise Refused(400, "invalid_json", f"the body is nested too deep: {error}") from None
        read = partial(
            request_in, kind, body, await pool.tokenizer(), pool.texts.encode_chat,
            context_length=model.context or None, adapters=adapters, record=call.session is not None,
        )  # fmt: skip
        ids = isinstance(prompt := body.get("prompt"), list) and not any(isinstance(it, str) for it in prompt[:1])
        request = read() if ids and kind == "completion" else await asyncio.to_thread(read)  # tokens of texts take time
        jobs = (_own_adapter(job, adapters) for job in request.jobs)
        return pool, replace(request, jobs=tuple(pool.job(call, job) for job in jobs))

    async def _events(
        self, pool: PoolGateway, call: Call, form: Form, request: Request, deltas: AsyncGenerator[Delta]
    ) -> AsyncGenerator[bytes]:
        async def sound() -> AsyncGenerator[Delta]:
            async for delta in deltas:
                if delta.restarted and not request.tools.parsed:
                    text = "The worker is lost, and another one begins this sample anew. Ask again."
                    raise Refused(503, "restarted", text, retry_after_s=1)
                yield delta

        try:
            try:
                async for chunk in form.stream(call, request, sound(), await decoding(pool)):
                    yield event(orjson.dumps(chunk))
            except (RolloutMQError, RedisError, OSError, TimeoutError) as error:
                yield event(bytes(refused_of(error, told).response.body))
            await self.gateway.quotas.told(call.tenant)
            yield event(b"[DONE]")
            await pool.delivered(call)
        finally:
            await deltas.aclose()

    def route(self, method: str, path: str, handler: Handler) -> Route:
        """A route of control. What its query says counts as said in the body."""

        async def endpoint(http: Http) -> Response:
            tenant = self.tenant(http)
            body = await body_of(http) if method == "POST" else {}
            answer = await handler(tenant, dict(http.query_params) | body)
            return answer if isinstance(answer, Response) else as_json(answer)

        return Route(path, endpoint, methods=[method])

    def tenant(self, http: Http) -> Tenant:
        """Who asks. Raises Refused (401)."""
        found = self.gateway.tenants.of(http.scope["headers"])
        http.state.tenant = found.name
        return found


def _own_adapter(job: GenerateJob, adapters: Mapping[str, str]) -> GenerateJob:
    """The job with its adapter as the pool calls it. Raises Refused for one that a tenant may not name."""
    if job.lora is None:
        return job
    if OWNER in job.lora:
        raise Refused(404, "model_not_found", f"There is no adapter {job.lora!r} here.", param="lora")
    return job.model_copy(update={"lora": adapters.get(job.lora, job.lora)})


async def decoding(pool: PoolGateway) -> Decode:
    """How the ids of a pool's model are shown."""
    tokenizer = await pool.tokenizer()
    return (None, None) if tokenizer is None else (pool.texts.decode, bytes_reader(tokenizer))


async def _or_none(results: Any, request: Request) -> Any:
    """The results; None for each sample of a request that was ended before it began."""
    try:
        return await results
    except JobFailed as failed:
        failure = failed.failure
        if not isinstance(failure, JobFailure) or (failure.outcome, failure.cause) != ("cancelled", STOPPED):
            raise
        return [[None] * job.n for job in request.jobs]


def check_template(body: Mapping[str, Any]) -> None:
    """Raises InvalidField for a body that brings a chat template."""
    if body.get("chat_template") is not None:
        raise InvalidField("chat_template", body["chat_template"], "absent: a template is a program")


def request_in(kind: str, body: dict[str, Any], tokenizer: Any, render: Render, **more: Any) -> Request:
    """The request in a body. tokenizer: None if workers make tokens: then nobody knows yet whether they fit."""
    if kind == "completion":
        if tokenizer is not None:
            body = body | {"prompt": _encoded(body.get("prompt"), tokenizer)}
        return completion_request(body, **more)
    if tokenizer is None and body.get("input_ids") is None:
        return chat_request(body, **more | {"context_length": None})
    return chat_request(body, render=render, **more)


def _encoded(prompt: Any, tokenizer: Any) -> Any:
    if isinstance(prompt, str) and prompt:
        return tokenizer(prompt)["input_ids"]
    if isinstance(prompt, list) and prompt and all(isinstance(one, str) and one for one in prompt):
        return [tokenizer(one)["input_ids"] for one in prompt]
    return prompt


def as_run(call: Call, request: Request) -> Request:
    """The request with the ids under which its jobs ran."""
    return request if call.request is None else replace(request, jobs=tuple(named(call.request, request.jobs)))


def _most(call: Call, request: Request) -> int:
    """The most tokens that a request can cost. Those of a text that workers take apart are no more than its bytes."""
    prompts = sum(len(call.raw) if job.token_ids is None else job.token_ids.size for job in request.jobs)
    return prompts + sum(job.n * job.sampling.max_new_tokens for job in request.jobs)
