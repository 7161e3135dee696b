"""Generates for batches, streams and OpenAI's bodies. Jobs of a session prefer the worker that has its prefix."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...messages.errors import InvalidField, RolloutMQError
from ...messages.model import GenerateJob
from ..calls import LastWorkers
from ..openai import bytes_reader, chat_request, completion_request, error_of, response
from .calls import Call, Calls
from .core import EngineCore
from .outputs import InferenceEngineOutput, Samples, StreamedSample, StreamingChunk, output_of
from .requests import Batch, InferenceEngineInput, read_batch
from .weights import WeightSync

PAUSE_MODES = ("abort", "in_place", "retract")
SYNONYMS = {"keep": "in_place"}
"""vLLM's words for modes."""
_NOT_FOR_OPENAI = frozenset({"n", "logprobs", "top_logprobs"})
"""Parameters that only a request's body may set. They say how many answers there are, and what is in them."""


class Generation:
    """SkyRLEngine documents the methods. worker_of: session id -> the worker that answered last for it."""

    def __init__(self, core: EngineCore, calls: Calls, weights: WeightSync) -> None:
        self._core, self._calls, self._weights = core, calls, weights
        self.worker_of = LastWorkers()

    @contextlib.asynccontextmanager
    async def begin(self) -> AsyncIterator[Call]:
        """Wait until the engine is not paused, publish received weights, and begin a call."""
        async with self._calls.begin() as call:
            await self._weights.end_sync()
            yield call

    async def read(self, input_batch: InferenceEngineInput, model: str | None = None) -> Batch:
        """The batch as jobs. model: see SkyRLEngine.generate."""
        texts = await self._core.ready_texts()
        lora = self._weights.adapter
        if model is not None:
            lora = None if model in {worker.model for worker in await self._core.workers(fresh=False)} else model
        return await asyncio.to_thread(read_batch, input_batch, self._core.sampling_params, texts, lora)

    async def output(self, batch: Batch, found: Sequence[Samples]) -> InferenceEngineOutput:
        return await asyncio.to_thread(
            output_of, batch.jobs, found, batch.wishes, self._core.texts, self._core.versions
        )

    async def generate(self, input_batch: InferenceEngineInput, model: str | None) -> InferenceEngineOutput:
        async with self.begin() as call:
            batch = await self.read(input_batch, model)
            found = await self._run(call, batch.jobs)
        return await self.output(batch, found)

    async def stream(self, input_batch: InferenceEngineInput) -> AsyncGenerator[StreamingChunk]:
        async with self.begin() as call:
            batch = await self.read(input_batch)
            samples = {
                (job.id, number): StreamedSample(place * job.n + number, self._core.texts, batch.wishes.logprobs)
                for place, job in enumerate(batch.jobs)
                for number in range(job.n)
            }
            jobs = {job.id: job for job in batch.jobs}
            async with contextlib.aclosing(call.stream([self._sticky(job) for job in batch.jobs])) as deltas:
                async for delta in deltas:
                    sample = samples[delta.job_id, delta.sample]
                    if delta.result is not None:
                        self._remember(jobs[delta.job_id], [delta.result])
                        del samples[delta.job_id, delta.sample]
                    for chunk in sample.chunks(delta):
                        yield chunk
            for sample in samples.values():  # stopped before they began
                yield sample.aborted()

    async def answer(self, payload: Mapping[str, Any], chat: bool) -> dict[str, Any]:
        """Answer {"json": body}, with an error as a body. chat: the body is one of chat completions."""
        try:
            body = _body(payload)
            if body.get("stream"):
                raise InvalidField("stream", True, "false: this call returns one answer")
            params = self._core.sampling_params.items()
            defaults = {name: value for name, value in params if name not in _NOT_FOR_OPENAI}
            if lora := body.get("model") if body.get("model") in self._weights.adapters else self._weights.adapter:
                defaults["lora"] = lora
            if chat:
                await self._core.workers(fresh=False)  # whose tokenizer continues a message, if none was given
                request = await asyncio.to_thread(chat_request, body, defaults, self._core.texts.encode_chat)
            else:
                request = await asyncio.to_thread(completion_request, body, defaults)
            request = replace(request, abort="abort")  # SkyRL continues such answers
            async with self.begin() as call:
                found = await self._run(call, request.jobs)
            decode, token_bytes = None, None
            if request.logprobs or any(job.token_ids is not None for job in request.jobs):
                texts = await self._core.ready_texts()
                decode, token_bytes = texts.decode, bytes_reader(texts.load())
            return await asyncio.to_thread(response, request, found, decode, token_bytes)
        except RolloutMQError as error:
            return error_of(error)

    async def render(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        """The ids of {"json": body of a chat}, or an error as a body."""
        try:
            body, texts = _body(payload), await self._core.ready_texts()
            request = await asyncio.to_thread(chat_request, body, None, texts.encode_chat, True)
            ids = request.jobs[0].token_ids
            return {"model": request.model, "token_ids": ids.tolist() if ids is not None else [], "features": None}
        except RolloutMQError as error:
            return error_of(error)

    async def _run(self, call: Call, jobs: Sequence[GenerateJob]) -> Sequence[Samples]:
        found = await call.run([self._sticky(job) for job in jobs])
        for job, samples in zip(jobs, found, strict=True):
            self._remember(job, samples)
        return found

    def _sticky(self, job: GenerateJob) -> GenerateJob:
        """The job. It prefers the worker that answered last for its session, if there is one."""
        worker = self.worker_of.get(job.session_id) if job.session_id is not None else None
        return job.model_copy(update={"prefer_worker": worker}) if worker else job

    def _remember(self, job: GenerateJob, samples: Samples) -> None:
        """Note the worker that has the prefix of a job's session now."""
        if job.session_id is None:
            return
        for sample in samples:
            if sample is not None:
                self.worker_of.note(job.session_id, sample.worker_id)


def checked_mode(mode: str) -> str:
    """A mode of `pause_generation` in the engine's own word. Raises InvalidField."""
    mode = SYNONYMS.get(mode, mode)
    if mode not in PAUSE_MODES:
        raise InvalidField("mode", mode, f"one of {', '.join(PAUSE_MODES)}")
    return mode


def _body(payload: Mapping[str, Any]) -> Mapping[str, Any]:
    body = payload.get("json") if isinstance(payload, Mapping) else None
    if not isinstance(body, Mapping):
        raise InvalidField("json", body, "the body, an object")
    return body
