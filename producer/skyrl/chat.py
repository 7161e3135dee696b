"""OpenAI's chat completions and completions: a body in, an answer or an error out."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from ...messages.errors import InvalidField, RolloutMQError
from ..openai import Request, chat_request, completion_request, error_of, response
from .calls import run_jobs
from .tasks import TaskMethods

_NOT_FOR_OPENAI = frozenset({"n", "logprobs", "top_logprobs"})
"""Of the engine's own parameters: how many answers, and what is in them, says the body alone."""


class ChatMethods(TaskMethods):
    """See SkyRLEngine."""

    async def chat_completion(self, request_payload: Mapping[str, Any]) -> dict[str, Any]:
        """Answer {"json": body of POST /v1/chat/completions, "headers": …}: a chat.completion, or an error as a
        dictionary whose `code` is the HTTP status. What the body may have says docs/skyrl.md. Workers render the
        conversation. Headers are not looked at."""
        return await self._answer(request_payload, chat_request)

    async def completion(self, request_payload: Mapping[str, Any]) -> dict[str, Any]:
        """The same for POST /v1/completions; the prompt is a text, ids, or a list of either."""
        return await self._answer(request_payload, completion_request)

    async def _answer(self, payload: Mapping[str, Any], read: Any) -> dict[str, Any]:
        try:
            body = payload.get("json") if isinstance(payload, Mapping) else None
            if not isinstance(body, Mapping):
                raise InvalidField("json", body, "the body, an object")
            if body.get("stream"):
                raise InvalidField("stream", True, "false: this call returns one answer")
            defaults = {name: value for name, value in self.sampling_params.items() if name not in _NOT_FOR_OPENAI}
            request: Request = await asyncio.to_thread(read, body, defaults)
            return await self._run(request)
        except RolloutMQError as error:
            return error_of(error)

    async def _run(self, request: Request) -> dict[str, Any]:
        calls = await self.open_calls()
        with calls.begin() as call:
            await calls.pass_gate(call)
            await self.end_sync()
            jobs = [self.sticky(job) for job in request.jobs]
            found = await run_jobs(await self.client(), call, jobs, self.timeout_s)
            self.remember_workers(jobs, found)
        decode = None
        if request.logprobs or any(job.token_ids is not None for job in jobs):
            decode = (await self.ready_texts()).decode
        return await asyncio.to_thread(response, request, found, decode)
