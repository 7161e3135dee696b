"""Jobs for LoRA adapters: who runs them, and which version sampled what."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from redis.asyncio import Redis
from support.peers.publishing import publisher
from support.pools.pool import eventually, letters, runs, status, wait_replies, worker
from support.specimens.adapters import lora, publish, publish_weights, results
from support.specimens.messages import job

from rolloutmq import InvalidField
from rolloutmq.messages import Broker, Lease, SamplingParams, Segment
from rolloutmq.messages.model.jobs import GenerateJob
from rolloutmq.messages.model.weights import WeightAnnouncement
from rolloutmq.sync.transfer.ledger import Ledger
from rolloutmq.worker.scripted.engine import ScriptedEngine


async def commit(db: Redis, *versions: tuple[str, int]) -> None:
    """The ledger after transfers that committed these versions."""
    ledger = Ledger(db, "default")
    for name, version in versions:
        epoch = await ledger.new_epoch()
        told = WeightAnnouncement(
            version=version, epoch=epoch, host="h", port=1, join_timeout_s=1, transfer_timeout_s=1, adapter=name
        )
        await ledger.announce(told)
        await ledger.close(told, committed=True, holder=None, lost={})


async def claimed(lease: Lease, adapters: Mapping[str, int], version: int = 0, jobs: int = 64) -> list[str]:
    return [claim.job_id for claim in await lease.claim(jobs, 64, version, adapters)]


async def test_a_job_waits_for_a_worker_that_has_its_adapter(db: Redis, broker: Broker) -> None:
    await commit(db, ("math", 2), ("code", 5))
    lease = Lease(db, "default", "w1")
    await lease.join(status("w1"))
    jobs = {
        "math": lora(),
        "math 2": lora(min_adapter_version=2),
        "math 3": lora(min_adapter_version=3),
        "math, weights 4": lora(min_version=4),
        "code": lora(lora="code"),
        "plain": job(),
        "unknown": lora(lora="none"),
    }
    await broker.enqueue(list(jobs.values()))
    names = {one.id: name for name, one in jobs.items()}

    async def take(adapters: Mapping[str, int], version: int = 0) -> set[str]:
        return {names[job_id] for job_id in await claimed(lease, adapters, version)}

    assert await take({}) == {"plain", "unknown"}
    assert (await broker.load()).queued[1] == 5
    assert await take({}) == set()
    assert await take({"code": 1}) == {"code"}
    assert await take({"code": 1, "math": 1}) == {"math"}
    assert await take({"code": 1}, version=4) == set()
    assert await take({"math": 2}) == {"math 2"}
    assert await take({"math": 2}, version=4) == {"math, weights 4"}
    assert (await broker.load()).queued[1] == 1
    assert await take({"math": 9}) == {"math 3"}
    assert await db.zcard(broker.keys.later[1]) == 0


async def test_jobs_set_aside_hold_up_nobody(db: Redis, broker: Broker) -> None:
    await commit(db, ("math", 1))
    lease = Lease(db, "default", "w1")
    await lease.join(status("w1"))
    aside, plain = [lora() for _ in range(300)], [job() for _ in range(20)]
    await broker.enqueue([*aside, *plain])
    found: list[str] = []
    for _ in range(10):
        found += await claimed(lease, {}, jobs=4)
    assert found == [one.id for one in plain]
    assert await claimed(lease, {"math": 1}, jobs=64) == [one.id for one in aside[:64]]


async def test_adapters_and_plain_jobs_side_by_side(redis_db: str, broker: Broker) -> None:
    async with worker(redis_db, engine=ScriptedEngine(lora=True)), publisher(redis_db) as source:
        await publish(source, "math", 3)
        await publish(source, "code", 1)
        await broker.enqueue([lora(n=2), job(), lora(lora="code"), job(n=2)])
        found = await results(broker, 6)
    assert sorted((one.adapter or "", one.adapter_version or 0) for one in found) == [
        ("", 0), ("", 0), ("", 0), ("code", 1), ("math", 3), ("math", 3),
    ]  # fmt: skip
    assert {one.adapter_segments for one in found} == {None, (Segment(1, 5),), (Segment(3, 5),)}


@pytest.mark.parametrize("able", [True, False])
async def test_an_adapter_that_nobody_published(redis_db: str, broker: Broker, able: bool) -> None:
    async with worker(redis_db, engine=ScriptedEngine(lora=able)), publisher(redis_db) as source:
        if able:
            await publish(source, "code", 1)
            await publish(source, "prose", 1)
        await broker.enqueue([lora(lora="moth")])
        [reply] = await wait_replies(broker, 1)
        assert reply.outcome.cause == "refused"
        assert "RequestRefused: lora='moth': an adapter that was published" in reply.outcome.error
        assert ("'code', 'prose'" if able else "none; nor is LoRA enabled") in reply.outcome.error
        assert len(await letters(broker)) == 1


async def test_a_job_waits_for_the_version_it_asks_for(redis_db: str, broker: Broker) -> None:
    async with worker(redis_db, engine=ScriptedEngine(lora=True)), publisher(redis_db) as source:
        await publish(source, "math", 1)
        patient = lora(min_adapter_version=2)
        await broker.enqueue([patient, lora()])
        [first] = await results(broker, 1)
        assert first.adapter_version == 1
        await publish(source, "math", 2)
        assert {one.job_id: one.adapter_version for one in await results(broker, 2)}[patient.id] == 2
    with pytest.raises(InvalidField, match="only together with lora"):
        GenerateJob.build(token_ids=[1], min_adapter_version=1)


async def test_a_job_published_for_between_its_claim_and_its_check_goes_back(redis_db: str, db: Redis) -> None:
    broker = Broker(db, "default")
    async with worker(redis_db, engine=ScriptedEngine(lora=True)) as running, publisher(redis_db) as source:
        follower = running.worker._follower
        known, asked = follower.adapters.refusal, asyncio.Event()

        async def late(name: str) -> Any:
            asked.set()
            await eventually(lambda: Ledger(db, "default").adapters())
            return await known(name)

        follower.adapters.refusal = late  # type: ignore[method-assign]
        await broker.enqueue([lora()])
        await asked.wait()
        assert (await publish(source, "math", 1)).state == "committed"
        [one] = await results(broker, 1)
        assert (one.adapter_version, one.attempt) == (1, 2)


@pytest.mark.slow
async def test_a_running_sample_keeps_its_version(redis_db: str, broker: Broker) -> None:
    engine = ScriptedEngine(tokens_per_s=200, lora=True)
    async with worker(redis_db, engine=engine, max_running=4) as running, publisher(redis_db) as source:
        await publish(source, "math", 1)
        await broker.enqueue([lora(tokens=1200), job(sampling=SamplingParams(max_new_tokens=1200))])
        await eventually(lambda: runs(engine, 2))
        assert (await publish(source, "math", 2)).state == "committed"
        assert await runs(engine, 2)  # nothing was interrupted
        assert engine.loaded.keys() == {("math", 1), ("math", 2)}
        await publish_weights(source, 1)  # this does interrupt
        await broker.enqueue([lora(tokens=5)])
        found = {(len(one.token_ids), one.adapter): one for one in await results(broker, 3)}
        long, plain, short = found[1200, "math"], found[1200, None], found[5, "math"]
        assert long.adapter_segments == (Segment(1, 1200),)
        assert long.versions == plain.versions == (0, 1)
        assert short.adapter_segments == (Segment(2, 5),)
        await eventually(lambda: engine.loaded.keys() == {("math", 2)}, what="the old version's end")
        assert running.worker._engine.info.adapters.current() == {"math": 2}


async def test_another_worker_goes_on_with_what_it_has_and_says_so(redis_db: str, broker: Broker) -> None:
    engine = ScriptedEngine(tokens_per_s=100, lora=True)
    async with publisher(redis_db) as source:
        async with worker(redis_db, engine=engine, drain_s=0.0) as first:
            await publish(source, "math", 1)
            await broker.enqueue([lora(tokens=200)])
            await eventually(lambda: max(first.sampled, default=0) > 20)
        await publish(source, "math", 2)  # nobody is there: those who come will have this one
        async with worker(redis_db, engine=ScriptedEngine(lora=True)):
            [one] = await results(broker, 1)
    assert one.attempt == 2
    assert one.adapter_version == 2
    assert [version for version, _ in one.adapter_segments] == [1, 2]
    assert one.adapter_segments[0].tokens > 20
    assert one.segments == (Segment(0, 200),)
