"""OpenAI's API: chat completions, completions, models; and what vLLM's servers have beside it."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from functools import partial
from typing import Any

import anyio
import orjson
from redis.exceptions import RedisError
from sse_starlette import EventSourceResponse
from starlette.background import BackgroundTask
from starlette.requests import Request as Http
from starlette.responses import Response
from starlette.routing import Route

from ...messages.errors import InvalidField, RolloutMQError
from ...messages.model import EmbedResult
from ...producer.calls import Delta, tasks
from ...producer.openai import (
    Render,
    Request,
    bytes_reader,
    chat_request,
    completion_request,
    detokenize,
    embedding_job,
    embedding_response,
    model_list,
    response,
    stream_chunks,
    switch,
    tokenize,
)
from ..http import Refused
from .answers import results_of
from .call import Call, read_call
from .errors import told
from .gateway import Gateway, named
from .requests import Request as Begun
from .requests import id_of
from .versions import check_versions, wait_s, watch_versions

MOST_WAIT_S = 600.0
PROMPTS = frozenset(
    {"messages", "prompt", "input_ids", "continue_final_message", "add_generation_prompt", "chat_template_kwargs"}
)
"""What of a body says nothing of how its answer is shown."""
PING_S = 15
"""A comment in a stream that is silent for so long, so that nothing between takes it for dead."""
Later = Callable[[], Any]


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


class OpenAIDoor:
    """The handlers of a gateway's OpenAI API."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._started = int(time.time())

    def routes(self) -> list[Route]:
        """All of them, those about a model also under /sessions/{session}."""
        about_models = [
            Route("/v1/chat/completions", partial(self._generate, kind="chat"), methods=["POST"]),
            Route("/v1/completions", partial(self._generate, kind="completion"), methods=["POST"]),
            Route("/v1/embeddings", self._embed, methods=["POST"]),
            Route("/v1/models", self._models, methods=["GET"]),
            Route("/v1/models/{model}", self._models, methods=["GET"]),
        ]
        return [
            *about_models,
            *(Route("/sessions/{session}" + it.path, it.endpoint, methods=it.methods) for it in about_models),
            Route("/tokenize", self._tokenize, methods=["POST"]),
            Route("/detokenize", self._detokenize, methods=["POST"]),
            Route("/v1/requests/{id}", self._fetch, methods=["GET"]),
            Route("/v1/requests/{id}", self._cancel, methods=["DELETE"]),
            Route("/finish_session", self._finish_session, methods=["POST"]),
        ]

    # --- generating ------------------------------------------------------------------------------------------------

    async def _generate(self, http: Http, kind: str) -> Response:
        gateway = self._gateway
        call = await read_call(http, gateway.tenants, gateway.settings.defaults)
        request = await self._read(call, kind)
        later = switch(call.body, "enqueue")
        if call.body.get("weight_version") is not None:
            await call.unless_gone(check_versions(gateway.facts, request.jobs, wait_s(http.headers)))
            call.watch = partial(watch_versions, gateway.facts, request.jobs)
        call.key, call.most = call.key or (secrets.token_hex(16) if later else None), _most(call, request)
        await gateway.begin(call, request.jobs)
        if later and call.request is not None:
            if call.request.state == "new":
                gateway.run(call, request.jobs)
            return as_json({"id": call.request.id, "object": "request", "status": "queued"}, 202)
        if request.stream:
            deltas = await gateway.stream(call, request.jobs)
            return Events(self._events(call, _as_run(call, request), deltas), call)
        results = await gateway.results(call, request.jobs)
        answer = response(_as_run(call, request), results, *await self._decoding())
        await gateway.quotas.told(call.tenant)
        return as_json(answer, then=partial(gateway.delivered, call))

    async def _read(self, call: Call, kind: str) -> Request:
        """The request in a body. Raises InvalidField, and Refused for a model that is not here."""
        gateway = self._gateway
        model, adapters = await gateway.facts.model(), await gateway.facts.adapters()
        said = model.name if call.body.get("model") is None else call.body["model"]
        body = call.body | {"model": said, "session_id": call.session}
        if not isinstance(said, str):
            raise InvalidField("model", said, "a text")
        if model.path and said not in model.names and said.rpartition(":")[2] not in adapters:
            here = ", ".join(sorted({model.name} | adapters.keys()))
            raise Refused(404, "model_not_found", f"The model {said!r} does not exist here: {here}.", param="model")
        _check_template(body)
        if type(body.get("seed")) is int and not await gateway.facts.honours("seed"):
            del body["seed"]  # OpenAI's is best effort, too
        try:
            call.about = orjson.dumps({"kind": kind} | {name: it for name, it in body.items() if name not in PROMPTS})
        except TypeError as error:  # it reads what is deeper than it writes
            raise Refused(400, "invalid_json", f"the body is nested too deep: {error}") from None
        tokenizer = await gateway.tokenizer()
        read = partial(
            _request, kind, body, tokenizer, gateway.texts.encode_chat, context_length=model.context or None,
            adapters=adapters, record=call.session is not None,
        )  # fmt: skip
        ids = isinstance(prompt := body.get("prompt"), list) and not any(isinstance(it, str) for it in prompt[:1])
        request = read() if ids and kind == "completion" else await asyncio.to_thread(read)  # tokens of texts take time
        return replace(request, jobs=tuple(gateway.job(call, job) for job in request.jobs))

    async def _events(self, call: Call, request: Request, deltas: AsyncGenerator[Delta]) -> AsyncGenerator[bytes]:
        async def sound() -> AsyncGenerator[Delta]:
            async for delta in deltas:
                if delta.restarted and not request.tools.parsed:
                    text = "The worker is lost, and another one begins this sample anew. Ask again."
                    raise Refused(503, "restarted", text, retry_after_s=1)
                yield delta

        try:
            try:
                async for chunk in stream_chunks(request, sound(), *await self._decoding()):
                    yield event(orjson.dumps(chunk))
            except (RolloutMQError, RedisError, OSError, TimeoutError) as error:
                yield event(bytes(told(error).response.body))
            await self._gateway.quotas.told(call.tenant)
            yield event(b"[DONE]")
            await self._gateway.delivered(call)
        finally:
            await deltas.aclose()

    async def _decoding(self) -> tuple[Any, Any]:
        """How ids are shown: as text, where the gateway has the model's tokenizer."""
        tokenizer = await self._gateway.tokenizer()
        return (None, None) if tokenizer is None else (self._gateway.texts.decode, bytes_reader(tokenizer))

    # --- answers later ---------------------------------------------------------------------------------------------

    async def _fetch(self, http: Http) -> Response:
        begun = await self._begun(http)
        try:
            wait = float(http.query_params.get("wait", "0"))
        except ValueError:
            wait = -1.0
        if not 0 <= wait <= MOST_WAIT_S:
            raise InvalidField("wait", http.query_params["wait"], f"seconds from 0 to {MOST_WAIT_S:g}")
        answer = begun.answer or await self._gateway.requests.wait(begun, wait)
        if answer is None:
            return as_json({"id": begun.id, "object": "request", "status": "running"}, 202)
        results = results_of(answer)
        about = orjson.loads(begun.about)
        kind = about.pop("kind")
        asked = {"messages": [{"role": "user", "content": "-"}]} if kind == "chat" else {"prompt": ["-"] * len(results)}
        adapters = await self._gateway.facts.adapters()
        request = _request(kind, about | asked, None, self._gateway.texts.encode_chat, adapters=adapters)
        ids = [samples[0].job_id for samples in results]
        jobs = tuple(job.model_copy(update={"id": it}) for job, it in zip(request.jobs, ids, strict=True))
        return as_json(response(replace(request, jobs=jobs), results, *await self._decoding()))

    async def _cancel(self, http: Http) -> Response:
        begun = await self._begun(http)
        await self._gateway.cancel(begun)
        return as_json({"id": begun.id, "object": "request", "status": "cancelled"})

    async def _begun(self, http: Http) -> Begun:
        """The request that a path names: by its key, or by its id."""
        tenant, key = self._tenant(http), http.path_params["id"]
        for name in (id_of(key), key):
            if (found := await self._gateway.requests.look(tenant, name)) is not None:
                return found
        raise Refused(404, "no_such_request", f"Nobody knows a request {key!r}; answers are kept for ten minutes.")

    # --- the rest --------------------------------------------------------------------------------------------------

    async def _embed(self, http: Http) -> Response:
        gateway = self._gateway
        call = await read_call(http, gateway.tenants, {})
        job = embedding_job(call.body)
        admission = await gateway.quotas.admit(call.tenant, len(call.raw))
        member = await gateway.core.member(call.tenant.name)
        used = None
        try:
            results = await call.unless_gone(tasks.run_tasks(member.core, [gateway.job(call, job)], EmbedResult))
            answer = embedding_response({"model": (await gateway.facts.model()).name} | call.body, results)
            used = answer["usage"]["total_tokens"]
        finally:
            admission.settle(used or 0)
        return as_json(answer)

    async def _models(self, http: Http) -> Response:
        self._tenant(http)
        model, adapters = await self._gateway.facts.model(), await self._gateway.facts.adapters()
        found = model_list(model.name, model.context, self._started, sorted(adapters))
        found["data"] = [one for one in found["data"] if one["id"]]
        if (wanted := http.path_params.get("model")) is None:
            return as_json(found)
        if wanted in model.names:
            return as_json(found["data"][0])
        for one in found["data"]:
            if one["id"] == wanted:
                return as_json(one)
        raise Refused(404, "model_not_found", f"The model {wanted!r} does not exist here.", param="model")

    async def _tokenize(self, http: Http) -> Response:
        call = await read_call(http, self._gateway.tenants, {})
        tokenizer, texts = await self._needed_tokenizer(), self._gateway.texts
        context = (await self._gateway.facts.model()).context

        def encode(text: str, special: bool) -> list[int]:
            return list(tokenizer(text, add_special_tokens=special)["input_ids"])

        _check_template(call.body)
        return as_json(
            await asyncio.to_thread(
                tokenize, call.body, encode, texts.encode_chat, context, tokenizer.convert_ids_to_tokens
            )
        )

    async def _detokenize(self, http: Http) -> Response:
        call = await read_call(http, self._gateway.tenants, {})
        tokenizer = await self._needed_tokenizer()
        return as_json(await asyncio.to_thread(detokenize, call.body, lambda ids: str(tokenizer.decode(list(ids)))))

    async def _needed_tokenizer(self) -> Any:
        if (tokenizer := await self._gateway.tokenizer()) is None:
            raise Refused(503, "no_tokenizer", "This gateway has no tokenizer: start it with --tokenizer.")
        return tokenizer

    async def _finish_session(self, http: Http) -> Response:
        tenant, session = self._tenant(http), http.query_params.get("session_id", "")
        return as_json({"status": "ok", "closed": await self._gateway.sessions.close(tenant, session)})

    def _tenant(self, http: Http) -> str:
        name = http.state.tenant = self._gateway.tenants.of(http.scope["headers"]).name
        return name


def _check_template(body: dict[str, Any]) -> None:
    if body.get("chat_template") is not None:
        raise InvalidField("chat_template", body["chat_template"], "absent: a template is a program")


def _request(kind: str, body: dict[str, Any], tokenizer: Any, render: Render, **more: Any) -> Request:
    """The request in a body. tokenizer: None if workers make tokens: then nobody knows yet whether they fit."""
    if kind == "completion":
        if tokenizer is not None:
            body = body | {"prompt": _encoded(body.get("prompt"), tokenizer)}
        return completion_request(body, **more)
    if tokenizer is None:
        return chat_request(body, **more | {"context_length": None})
    return chat_request(body, render=render, **more)


def _encoded(prompt: Any, tokenizer: Any) -> Any:
    if isinstance(prompt, str) and prompt:
        return tokenizer(prompt)["input_ids"]
    if isinstance(prompt, list) and prompt and all(isinstance(one, str) and one for one in prompt):
        return [tokenizer(one)["input_ids"] for one in prompt]
    return prompt


def _as_run(call: Call, request: Request) -> Request:
    """The request with the ids under which its jobs ran."""
    return request if call.request is None else replace(request, jobs=tuple(named(call.request, request.jobs)))


def _most(call: Call, request: Request) -> int:
    """The most tokens that a request can cost. Those of a text that workers take apart are no more than its bytes."""
    prompts = sum(len(call.raw) if job.token_ids is None else job.token_ids.size for job in request.jobs)
    return prompts + sum(job.n * job.sampling.max_new_tokens for job in request.jobs)
