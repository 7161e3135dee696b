"""OpenAI's API: chat completions, completions, models; and what vLLM's servers have beside it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from functools import partial
from typing import Any

import orjson
from starlette.requests import Request as Http
from starlette.responses import Response
from starlette.routing import Route

from ...messages.errors import InvalidField
from ...messages.model import EmbedResult
from ...producer.calls import tasks
from ...producer.openai import detokenize, embedding_job, embedding_response, model_list, response, tokenize
from ..http import Refused
from .answers import results_of
from .call import Call, read_call
from .door import Door, Form, as_json, check_template, chunks_of, decoding, request_in
from .gateway import Gateway
from .pool_gateway import PoolGateway
from .requests import Request as Begun
from .requests import id_of
from .tenants import Tenant

MOST_WAIT_S = 600.0
# OpenAI's types have no finish reason "abort".
CHAT = Form(lambda body: ("chat", body), lambda it: it.openai(), chunks_of, defaults=True, abort="length")
COMPLETION = replace(CHAT, read=lambda body: ("completion", body))


class OpenAIDoor(Door):
    """The handlers of a gateway's OpenAI API."""

    def __init__(self, gateway: Gateway) -> None:
        super().__init__(gateway)
        self._started = int(time.time())

    def routes(self) -> list[Route]:
        """All of them, those about a model also under /sessions/{session}."""
        about_models = [
            Route("/v1/chat/completions", partial(self.generate, form=CHAT), methods=["POST"]),
            Route("/v1/completions", partial(self.generate, form=COMPLETION), methods=["POST"]),
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

    # --- answers later ---------------------------------------------------------------------------------------------

    async def _fetch(self, http: Http) -> Response:
        pool, begun = await self._begun(http)
        try:
            wait = float(http.query_params.get("wait", "0"))
        except ValueError:
            wait = -1.0
        if not 0 <= wait <= MOST_WAIT_S:
            raise InvalidField("wait", http.query_params["wait"], f"seconds from 0 to {MOST_WAIT_S:g}")
        answer = begun.answer or await pool.requests.wait(begun, wait)
        if answer is None:
            return as_json({"id": begun.id, "object": "request", "status": "running"}, 202)
        results = results_of(answer)
        about = orjson.loads(begun.about)
        kind = about.pop("kind")
        asked = {"messages": [{"role": "user", "content": "-"}]} if kind == "chat" else {"prompt": ["-"] * len(results)}
        adapters = await self.gateway.adapters(pool, self.tenant(http))
        request = request_in(kind, about | asked, None, pool.texts.encode_chat, adapters=adapters)
        ids = [samples[0].job_id for samples in results]
        jobs = tuple(job.model_copy(update={"id": it}) for job, it in zip(request.jobs, ids, strict=True))
        return as_json(response(replace(request, jobs=jobs), results, *await decoding(pool)))

    async def _cancel(self, http: Http) -> Response:
        pool, begun = await self._begun(http)
        await pool.cancel(begun)
        return as_json({"id": begun.id, "object": "request", "status": "cancelled"})

    async def _begun(self, http: Http) -> tuple[PoolGateway, Begun]:
        """The request that a path names: by its key, or by its id."""
        tenant, key = self.tenant(http), http.path_params["id"]
        for pool in await self.gateway.pools_of(tenant):
            for name in (id_of(key), key):
                if (found := await pool.requests.look(tenant.name, name)) is not None:
                    return pool, found
        raise Refused(404, "no_such_request", f"Nobody knows a request {key!r}; answers are kept for ten minutes.")

    # --- the rest --------------------------------------------------------------------------------------------------

    async def _embed(self, http: Http) -> Response:
        call = await read_call(http, self.gateway.tenants, {})
        job = embedding_job(call.body)
        pool = await self._pool(call)
        admission = await self.gateway.quotas.admit(call.tenant, len(call.raw))
        member = await pool.core.member(call.tenant.name)
        used = None
        try:
            results = await call.unless_gone(tasks.run_tasks(member.core, [pool.job(call, job)], EmbedResult))
            answer = embedding_response({"model": (await pool.facts.model()).name} | call.body, results)
            used = answer["usage"]["total_tokens"]
        finally:
            admission.settle(used or 0)
        return as_json(answer)

    async def _models(self, http: Http) -> Response:
        tenant, wanted = self.tenant(http), http.path_params.get("model")
        pools = await self.gateway.pools_of(tenant)
        shown = [await self._model(pool, tenant) for pool in pools]
        if wanted is None:
            return as_json({"object": "list", "data": [one for found in shown for one in found]})
        for pool, found in zip(pools, shown, strict=True):
            if found and wanted in (await pool.facts.model()).names:
                return as_json(found[0])
        for one in (one for found in shown for one in found):
            if one["id"] == wanted:
                return as_json(one)
        raise Refused(404, "model_not_found", f"The model {wanted!r} does not exist here.", param="model")

    async def _model(self, pool: PoolGateway, tenant: Tenant) -> list[dict[str, Any]]:
        """A pool's model, and the adapters that a tenant may use, with their versions; [] while no worker is there."""
        model, adapters = await pool.facts.model(), await self.gateway.adapters(pool, tenant)
        versions = {"": (await pool.facts.read(1.0)).committed} | await pool.facts.adapters()
        data = model_list(model.name, model.context, self._started, sorted(adapters))["data"]
        numbers = (versions[adapters[one["id"]] if one["parent"] is not None else ""] for one in data)
        return [one | {"weight_version": number} for one, number in zip(data, numbers, strict=True) if one["id"]]

    async def _tokenize(self, http: Http) -> Response:
        call = await read_call(http, self.gateway.tenants, {})
        pool = await self._pool(call)
        tokenizer, context = await _needed_tokenizer(pool), (await pool.facts.model()).context

        def encode(text: str, special: bool) -> list[int]:
            return list(tokenizer(text, add_special_tokens=special)["input_ids"])

        check_template(call.body)
        of_id = tokenizer.convert_ids_to_tokens
        return as_json(await asyncio.to_thread(tokenize, call.body, encode, pool.texts.encode_chat, context, of_id))

    async def _detokenize(self, http: Http) -> Response:
        call = await read_call(http, self.gateway.tenants, {})
        tokenizer = await _needed_tokenizer(await self._pool(call))
        return as_json(await asyncio.to_thread(detokenize, call.body, lambda ids: str(tokenizer.decode(list(ids)))))

    async def _pool(self, call: Call) -> PoolGateway:
        """The pool that a body's model is in; the first one for a name that nobody knows."""
        said = call.body.get("model")
        try:
            return (await self.gateway.serving(call.tenant, said if isinstance(said, str) else None))[0]
        except Refused:
            return await self.gateway.of(call.tenant)

    async def _finish_session(self, http: Http) -> Response:
        tenant, session = self.tenant(http), http.query_params.get("session_id", "")
        closed = [await it.sessions.close(tenant.name, session) for it in await self.gateway.pools_of(tenant)]
        return as_json({"status": "ok", "closed": any(closed)})


async def _needed_tokenizer(pool: PoolGateway) -> Any:
    if (tokenizer := await pool.tokenizer()) is None:
        raise Refused(503, "no_tokenizer", "This gateway has no tokenizer: start it with --tokenizer.")
    return tokenizer
