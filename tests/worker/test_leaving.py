"""A drain takes what it was given, however slow Redis and the engine are."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from support.pools.pool import eventually, worker
from support.specimens.messages import job

from rolloutmq.messages import Broker, Lease, SamplingParams
from rolloutmq.worker.gate import Gate
from rolloutmq.worker.leaving import Leaving
from rolloutmq.worker.scripted.engine import ScriptedEngine


class Slow:
    """Everything a leaving worker asks takes as long as it may, or `call_s` where nobody waits for less."""

    def __init__(self, call_s: float) -> None:
        self.now, self.call_s = 0.0, call_s
        in_flight = SimpleNamespace(idle=self.wait, interrupt=self.wait)
        self.generation: Any = SimpleNamespace(gate=Gate(), in_flight=in_flight, running=1)
        self.held: list[Any] = []

    def monotonic(self) -> float:
        return self.now

    async def wait(self, timeout_s: float) -> bool:
        self.now += timeout_s
        return False

    async def call(self, *_: Any) -> int:
        self.now += self.call_s
        return 0


@pytest.mark.parametrize("drain_s", [2.0, 5.0, 30.0])
@pytest.mark.parametrize("part", [0.0, 0.1, 0.2, 0.3, 0.9])
async def test_a_drain_ends_within_its_budget(drain_s: float, part: float, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow(part * drain_s)
    monkeypatch.setattr("rolloutmq.worker.leaving.time", slow)

    async def at_most(*_: Any) -> None:
        """Redis answers just before the time is over, or not at all."""
        if slow.now + slow.call_s > drain_s:
            slow.now = max(slow.now, drain_s)
            raise TimeoutError
        slow.now += slow.call_s

    names = dict.fromkeys(("release", "release_claims", "flushed", "settled", "leave"), at_most)
    parts: Any = SimpleNamespace(**names, jobs=set)
    await Leaving(slow.generation, slow.held, parts, parts).leave(parts, drain_s, [], at_most)  # type: ignore[arg-type]
    assert slow.now <= drain_s
    assert slow.generation.gate.reasons == ["drain"]


async def test_a_worker_leaves_though_redis_answers_nothing(
    redis_db: str, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def silent(*_: Any) -> Any:
        await asyncio.Event().wait()

    async with worker(redis_db, engine=ScriptedEngine(tokens_per_s=1.0), drain_s=0.0) as running:
        await broker.enqueue([job(sampling=SamplingParams(max_new_tokens=1000))])
        await eventually(lambda: running.worker._generation.running)
        for call in ("claim", "complete", "release", "leave"):
            monkeypatch.setattr(Lease, call, silent)
        running.worker.drain()
        await running.task
