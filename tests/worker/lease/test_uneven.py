"""Workers of one pool that differ in what they can do, and in how fast they are."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.pools.pool import eventually, wait_replies, worker
from support.specimens.messages import job

from rolloutmq.messages import Broker, RolloutResult, SamplingParams
from rolloutmq.worker.engine import EngineInfo
from rolloutmq.worker.scripted.engine import ScriptedEngine

SHORT = SamplingParams(max_new_tokens=5)


class Kind(ScriptedEngine):
    """An engine with a context of its own and more features."""

    def __init__(self, context: int = 4096, *features: str) -> None:
        super().__init__()
        self.context, self.more = context, frozenset(features)

    @property
    def info(self) -> EngineInfo:
        info = super().info
        return replace(info, context_length=self.context, features=info.features | self.more)


async def test_one_pool_may_mix_engines(redis_db: str, broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that wait are woken for what they alone can do: nobody comes to look by himself here."""
    monkeypatch.setattr("rolloutmq.worker.lease.claims.WAKE_S", 3600)
    plain, able, long = Kind(), Kind(4096, "seed"), Kind(1 << 20)
    async with (
        worker(redis_db, engine=plain) as first,
        worker(redis_db, engine=able) as second,
        worker(redis_db, engine=long) as third,
    ):
        for round_ in range(1, 6):
            seeded, wide = job(seed=1, sampling=SHORT), job(sampling=SamplingParams(max_new_tokens=4096))
            await broker.enqueue([seeded, wide])
            outcomes = [reply.outcome for reply in await wait_replies(broker, 2 * round_)]
            by = {one.job_id: (one.worker_id, one.attempt) for one in outcomes if isinstance(one, RolloutResult)}
            assert (by[seeded.id], by[wide.id]) == ((second.id, 1), (third.id, 1))
        assert first.generation.finished == 0


async def test_a_slow_worker_claims_nothing_that_it_cannot_start(redis_db: str, broker: Broker) -> None:
    quick, slow = ScriptedEngine(tokens_per_s=2000.0), ScriptedEngine(tokens_per_s=10.0)
    await broker.enqueue([job(sampling=SamplingParams(max_new_tokens=20)) for _ in range(400)])
    sizes = {"max_running": 4, "prefetch": 40}
    async with worker(redis_db, engine=slow, **sizes) as late, worker(redis_db, engine=quick, **sizes) as early:
        most = 0

        async def done() -> bool:
            nonlocal most
            most = max(most, late.status.held)
            return (await broker.load()).done == 400

        await eventually(done)
        assert most <= 12, "four run, and two of these end in a second"
        assert late.generation.finished < 40 < early.generation.finished
