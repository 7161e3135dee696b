"""Generation on an engine whose every request ends when the test says so."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from support.pools.pool import eventually

from rolloutmq.messages.model.jobs import GenerateJob
from rolloutmq.messages.model.sampling import SamplingParams
from rolloutmq.worker.engine.protocol import EngineOutput, EngineRequest, Generated
from rolloutmq.worker.generation import Generation
from rolloutmq.worker.jobs.sample import SampleRun


def tokens(count: int) -> tuple[np.ndarray, np.ndarray]:
    return np.arange(count, dtype=np.int32), -np.arange(count, dtype=np.float32)


class ManualEngine:
    """Requests end when the test says so, with as many tokens as it says."""

    def __init__(self) -> None:
        self.requests: list[EngineRequest] = []
        self.ends: dict[str, asyncio.Future[EngineOutput]] = {}
        self.made: dict[str, int] = {}
        self.looks = 0

    async def generate(self, request: EngineRequest) -> EngineOutput:
        self.requests.append(request)
        self.ends[request.request_id] = asyncio.get_running_loop().create_future()
        return await self.ends[request.request_id]

    def progress(self, request_id: str, start: int = 0) -> Generated | None:
        token_ids, logprobs = tokens(self.made.get(request_id, 0))
        return Generated(token_ids[start:], logprobs[start:])

    async def operate(self, operation: str, params: Mapping[str, Any]) -> dict[str, Any]:
        assert operation == "generated"
        self.looks += 1
        return {"requests": [name for name, made in self.made.items() if made and not self.ends[name].done()]}

    def end(self, request_id: str, count: int, reason: str = "length") -> None:
        self.ends[request_id].set_result(EngineOutput(*tokens(count), reason))  # type: ignore[arg-type]

    def abort_all(self) -> None:
        for request_id, end in self.ends.items():
            if not end.done():
                self.end(request_id, self.made.get(request_id, 0), "abort")


class Bench:
    """Samples running on a ManualEngine."""

    def __init__(self, slots: int = 8) -> None:
        self.engine = ManualEngine()
        self.finished: list[SampleRun] = []
        self.deaths = 0
        self.generation = Generation(
            self.engine,  # type: ignore[arg-type]
            slots,
            on_finished=self.finished.append,
            on_refused=lambda sample, error: pytest.fail(str(error)),
            on_failed=lambda sample, error: pytest.fail(str(error)),
            on_dead=self._died,
        )
        self.generation.state.version = 1

    def _died(self) -> None:
        self.deaths += 1

    def switched(self, version: int, counts: dict[str, int], anew: Sequence[str] = ()) -> None:
        self.generation.in_flight.switched(version, counts, anew)
        self.generation.state.version = version

    async def run(self, count: int, **fields: Any) -> tuple[list[SampleRun], list[str]]:
        """Samples that run, and their request ids. fields: of their job."""
        before = len(self.engine.requests)
        given = {"token_ids": [1, 2]} | fields
        job = GenerateJob(n=count, sampling=SamplingParams(max_new_tokens=100), **given)
        samples = [SampleRun(job, np.array([1, 2], np.int32), i, 1, 0.0) for i in range(count)]
        self.generation.add(samples)
        await eventually(lambda: len(self.engine.requests) == before + count)
        return samples, [request.request_id for request in self.engine.requests[before:]]


async def all_that_can_happen_now() -> None:
    for _ in range(20):
        await asyncio.sleep(0)
