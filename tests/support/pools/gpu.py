"""One worker with a real engine in this process, and everything that speaks to it; as set, for GPUs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from support.pools.in_place import Judge
from support.pools.pool import eventually

from rolloutmq import GenerateJob, JobHandle, RolloutClient, RolloutResult, SamplingParams, WeightPublisher
from rolloutmq.ops.redis.embedded import EmbeddedRedis
from rolloutmq.producer.control import PoolControl
from rolloutmq.worker.config import WorkerConfig
from rolloutmq.worker.sglang.engine import SGLangConfig, SGLangEngine
from rolloutmq.worker.text.tokenizer import NoTokenizer
from rolloutmq.worker.worker import Worker

PROMPT = list(range(5, 40))


TOLERANCE = 0.05
"""Of a log-probability in bfloat16."""


def greedy(count: int, **fields: Any) -> GenerateJob:
    sampling = SamplingParams(max_new_tokens=count, temperature=0.0, ignore_eos=True)
    return GenerateJob(token_ids=PROMPT, sampling=sampling, **fields)


def check_greedy(model: Path, result: RolloutResult) -> None:
    """Every token is the model's own choice, and has its log-probability: with KV that was computed anew, too.

    Where two tokens are nearly as likely, a decode and a prefill may choose differently: so not token for token.
    """
    assert result.versions == (0,)
    error = Judge([model], "cuda").error(PROMPT, result, [(0, len(result.token_ids))])  # type: ignore[arg-type]
    assert error < TOLERANCE, result


class Pool:
    """One worker in this process, and everything that speaks to it."""

    def __init__(self, url: str, model: Path, **more: Any) -> None:
        settings: dict[str, Any] = {
            "dtype": "bfloat16",
            "max_running": 16,
            "max_total_tokens": 200_000,
            "attention_backend": "triton",
            "sampling_backend": "pytorch",
            "prefill_cuda_graph": False,
        }
        self.engine = SGLangEngine(SGLangConfig(model=str(model), **(settings | more)))
        self.worker = Worker(WorkerConfig(redis_url=url, max_running=16, drain_s=5.0), self.engine, NoTokenizer())
        self.control = PoolControl(url)
        self.client = RolloutClient(url)
        self.source = WeightPublisher(url, join_timeout_s=3.0)
        self.serving = asyncio.create_task(self.worker.run())

    async def tell(self, what: Any) -> Any:
        """The one worker's answer, which must be that it is done."""
        (answer,) = (await what).check().values()
        return answer.result

    async def why_not(self, what: Any) -> str:
        """The one worker's reason to refuse."""
        (answer,) = (await what).values()
        assert answer.kind == "RequestRefused", answer
        return str(answer.error)

    async def generate(self, count: int, **fields: Any) -> RolloutResult:
        (result,) = await self.client.wait(await self.client.submit(greedy(count, **fields)), 120)
        return result

    async def fly(self, count: int) -> JobHandle:
        """A sample that has some of its tokens, and not all."""
        handle = await self.client.submit(greedy(count))

        def some() -> bool:
            found = [self.engine.progress(one) for one in self.worker.vitals.generation.in_flight.running]
            return any(one is not None and len(one.token_ids) for one in found)

        await eventually(some, timeout=30.0)
        return handle

    async def close(self) -> None:
        self.worker.drain()
        await asyncio.gather(self.serving, return_exceptions=True)
        await asyncio.to_thread(self.source.close)
        await self.control.aclose()
        await self.client.aclose()


@asynccontextmanager
async def running(model: Path, **more: Any) -> AsyncIterator[Pool]:
    with EmbeddedRedis() as server:
        pool = Pool(server.url, model, **more)
        try:
            await eventually(lambda: pool.worker.joined.is_set() or pool.serving.done(), timeout=300.0)
            if pool.serving.done():
                pool.serving.result()
            yield pool
        finally:
            await pool.close()
