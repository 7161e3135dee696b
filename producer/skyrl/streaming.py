"""generate_stream: the tokens of a batch while they are generated."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

from ...messages.errors import JobFailed
from ...messages.model import GenerateJob
from ..calls import Delta
from ..client import RolloutClient
from ..inbox import JobHandle
from ..openai import GrowingText
from .calls import Call
from .generation import GenerationMethods
from .requests import read_batch
from .texts import Texts
from .types import InferenceEngineInput, StreamingChunk

AHEAD = 1024
"""Deltas that may wait for a caller that is slow to take them."""


class Growing:
    """One sample as its caller has seen it."""

    def __init__(self, place: int, index: int, texts: Texts, logprobs: bool) -> None:
        """place: of its job in the batch. index: of the sample."""
        self.place, self.index, self._texts, self._logprobs = place, index, texts, logprobs
        self.ids: list[int] = []
        self._text = GrowingText(texts.decode)

    def chunk(self, delta: Delta) -> StreamingChunk:
        """What to show of a delta. One of a sample that was begun again has all of it, and nothing of before."""
        if delta.restarted:
            self.ids, self._text = [], GrowingText(self._texts.decode)
        ids = delta.token_ids.tolist()
        logprobs = delta.logprobs.tolist() if self._logprobs and delta.logprobs is not None else None
        self.ids += ids
        text = self._text.add(ids, last=delta.result is not None)
        return self._made(text, ids, logprobs, delta.result.finish_reason if delta.result is not None else None)

    def aborted(self) -> StreamingChunk:
        """The last chunk of one that was stopped before it had a result."""
        return self._made("", [], [] if self._logprobs else None, "abort")

    def _made(self, text: str, ids: list[int], logprobs: list[float] | None, stop: str | None) -> StreamingChunk:
        return {
            "index": self.index,
            "delta_text": text,
            "delta_token_id": ids[-1] if ids else None,
            "delta_logprob": logprobs[-1] if logprobs else None,
            "is_finished": stop is not None,
            "stop_reason": stop,
            "cumulative_text": self._text.text,
            "cumulative_token_ids": list(self.ids),
            "delta_token_ids": ids,
            "delta_logprobs": logprobs,
        }


class StreamingMethods(GenerationMethods):
    """See SkyRLEngine."""

    def supports_streaming(self) -> bool:
        """Whether a worker of the pool streams."""
        return self.has("stream")

    async def generate_stream(self, input_batch: InferenceEngineInput) -> AsyncGenerator[StreamingChunk]:
        """What `generate` would return, in chunks as it is generated; of every sample in order, with `is_finished` at
        its last. Samples of different prompts come as they come. Raises as `generate` does.

        Left early, it cancels what it has in the pool.
        """
        calls = await self.open_calls()
        with calls.begin() as call:
            await calls.pass_gate(call)
            await self.end_sync()
            texts = await self.ready_texts()
            batch = await asyncio.to_thread(read_batch, input_batch, self.sampling_params, texts)
            client = await self.client()
            growing: dict[tuple[str, int], Growing] = {}
            for place, job in enumerate(batch.jobs):
                for number in range(job.n):
                    growing[job.id, number] = Growing(place, place * job.n + number, texts, batch.wishes.logprobs)
            jobs = [self.sticky(job) for job in batch.jobs]
            async with contextlib.aclosing(merged(client, call, jobs, self.timeout_s)) as deltas:
                async for delta in deltas:
                    sample = growing[delta.job_id, delta.sample]
                    if delta.result is not None:
                        self.remember_workers([jobs[sample.place]], [[delta.result]])
                        del growing[delta.job_id, delta.sample]
                    yield sample.chunk(delta)
            for sample in growing.values():  # stopped before they began
                yield sample.aborted()


async def merged(
    client: RolloutClient, call: Call, jobs: list[GenerateJob], timeout_s: float | None
) -> AsyncGenerator[Delta]:
    """The deltas of several jobs, as they come; all of each sample, unless the call is stopped.

    Raises JobFailed and what submitting raises. Left early, it cancels what is in the pool.
    """
    arrived: asyncio.Queue[Delta | BaseException | None] = asyncio.Queue(AHEAD)

    async def follow(job: GenerateJob) -> None:
        ended: BaseException | None = None
        try:
            if not call.stopped():
                call.open[job.id] = JobHandle(job.id, job.group, job.n)
                handle = await client.submit(job.model_copy(update={"stream": True}), timeout=timeout_s)
                if call.stopped():  # meanwhile: whoever stopped it did it before the pool knew this job
                    await client.stop([job.id])
                async for delta in client.stream(handle, timeout=timeout_s):
                    await arrived.put(delta)
                call.open.pop(job.id, None)
        except JobFailed as error:
            call.open.pop(job.id, None)
            if not (call.stopped() and getattr(error.failure, "outcome", "") == "cancelled"):
                ended = error
        except Exception as error:
            ended = error
        await arrived.put(ended)

    await client.check(jobs)
    tasks = [asyncio.create_task(follow(job)) for job in jobs]
    left = len(tasks)
    try:
        while left:
            item = await arrived.get()
            if isinstance(item, Delta):
                yield item
            elif item is not None:
                raise item
            else:
                left -= 1
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if call.open and not client.closed:
            opened, call.open = list(call.open), {}
            with contextlib.suppress(Exception):
                async with asyncio.timeout(5.0):
                    await client.cancel(opened)
