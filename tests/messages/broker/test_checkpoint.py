"""What a long sample has generated is saved while it runs, and the next worker goes on from there."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from support.pools.commanded import hurry
from support.pools.pool import check_scripted, eventually, record, saved, shard_with, wait_replies, worker
from support.specimens.messages import job, result

from rolloutmq.messages import (
    Broker,
    Finished,
    GenerateJob,
    Lease,
    Partial,
    Piece,
    PoolBusy,
    Release,
    SamplingParams,
    Segment,
    codec,
    decode,
)
from rolloutmq.worker.engine.protocol import Generated
from rolloutmq.worker.scripted.engine import ScriptedEngine

SLOW = 200.0
FORGET = (
    "for _, f in ipairs(redis.call('HKEYS', KEYS[1])) do if f:find('^k0') then redis.call('HDEL', KEYS[1], f) end end"
)
LONG = SamplingParams(max_new_tokens=4000)  # twenty seconds: a busy machine sees it run
BRIEF = SamplingParams(max_new_tokens=400)


def piece(one, number: int, attempt: int = 1, sample: int = 0, start: int = 0) -> Piece:
    return Piece(
        one.id,
        attempt,
        sample,
        number,
        Partial(start=start, token_ids=[1, 2], logprobs=[0, 0], segments=(Segment(0, 2),)),
    )


@pytest.mark.one_shard
async def test_pieces_come_back_in_order(broker: Broker, db: Redis, joined) -> None:
    one = job(n=3)
    await broker.enqueue([one])
    lease = await joined()
    await lease.claim(1, 9, 0)
    await lease.checkpoint([piece(one, number, start=2 * number) for number in range(12)])
    await lease.checkpoint([piece(one, 0, sample=1), piece(one, 0, sample=2)])
    await lease.complete([Finished(one.id, 1, 1, result(one, 1))])
    assert await lease.checkpoint([piece(one, 1, sample=1)]) == ["ok"]  # too late, and not kept
    again = Lease(broker.redis, "default", lease.worker_id)
    (claim,) = await again.claim(1, 9, 0)
    assert {sample: len(blobs) for sample, blobs in claim.partials.items()} == {0: 12, 2: 1}
    assert [decode(blob, Partial).start for blob in claim.partials[0]] == list(range(0, 24, 2))
    for sample in (0, 2):
        await lease.complete([Finished(one.id, 1, sample, result(one, sample))])
    assert (await db.hgetall(broker.keys.job(one.id))).keys() == {b"st", b"h"}


@pytest.mark.one_shard
async def test_only_the_owner_in_its_attempt_may_save(broker: Broker, joined) -> None:
    one, gone = job(), job()
    await broker.enqueue([one, gone])
    first, second = await joined("w1"), await joined("w2")
    await first.claim(2, 9, 0)
    await broker.cancel([gone.id])
    assert await second.checkpoint([piece(one, 0)]) == ["fenced"]
    assert await first.checkpoint([piece(one, 0, attempt=2), piece(gone, 0), piece(one, 0)]) == [
        "fenced",
        "fenced",
        "ok",
    ]


async def test_a_killed_worker_costs_at_most_the_interval(redis_db: str, broker: Broker) -> None:
    one = job(n=4, sampling=LONG)
    await broker.enqueue([one])
    async with worker(redis_db, engine=ScriptedEngine(SLOW), checkpoint_s=0.2) as victim:

        async def kept() -> int:
            fields = await record(broker, one.id)
            return min(sum(_tokens(fields, sample)) for sample in range(4))

        await eventually(lambda: _at_least(kept, 250), what="250 tokens of each sample are saved")
        pieces = [name for name in await record(broker, one.id) if name.startswith(b"k0.")]
        assert pieces, "saved in pieces, not all over again"
        await victim.die()
        before = await kept()
    async with worker(redis_db) as survivor:
        results = [reply.outcome for reply in await wait_replies(broker, 4)]
        redone = survivor.generation.generated_tokens
    for found in results:
        check_scripted(found, 3)
        assert (found.attempt, len(found.token_ids)) == (2, 4000)
    assert redone <= 4 * (4000 - before)


def _tokens(fields: dict[bytes, bytes], sample: int) -> list[int]:
    return [
        len(decode(blob, Partial).token_ids)
        for name, blob in fields.items()
        if name.split(b".")[0] == f"k{sample}".encode()
    ]


async def _at_least(count, least: int) -> bool:
    return await count() >= least


async def test_saving_goes_on_after_an_outage(redis_db: str, broker: Broker, monkeypatch) -> None:
    failed = asyncio.Event()
    checkpoint = Lease.checkpoint

    async def away_once(self: Lease, pieces):
        if not failed.is_set():
            failed.set()
            await checkpoint(self, pieces)  # it was done, and nobody heard
            raise RedisConnectionError("away")
        return await checkpoint(self, pieces)

    monkeypatch.setattr(Lease, "checkpoint", away_once)
    one = job(sampling=LONG)
    await broker.enqueue([one])
    async with worker(redis_db, engine=ScriptedEngine(SLOW), checkpoint_s=0.1) as victim:
        await eventually(lambda: saved(broker, one.id, "k0.2"))
        await victim.die()
    async with worker(redis_db):
        (reply,) = await wait_replies(broker, 1)
    check_scripted(reply.outcome, 3)


async def left_behind(broker: Broker, joined, one: GenerateJob, pieces: list[Piece]) -> None:
    """A worker saved these pieces of the job and died."""
    await broker.enqueue([one])
    lease = await joined("earlier")
    await lease.claim(1, 1, 0)
    await lease.checkpoint(pieces)
    for part in lease.parts:
        await part.redis.zadd(part.keys.workers, {"earlier": 1})


async def test_pieces_with_a_gap_are_used_up_to_the_gap(redis_db: str, broker: Broker, joined) -> None:
    """A delayed copy of an earlier, shorter piece replaced the one that the next piece goes on from."""
    one = job(sampling=SamplingParams(max_new_tokens=8))
    tokens = list(range(6))
    parts = [
        Partial(
            start=start,
            token_ids=tokens[start:end],
            logprobs=[0.0] * (end - start),
            segments=(Segment(0, end - start),),
        )
        for start, end in ((0, 2), (3, 6))
    ]
    await left_behind(broker, joined, one, [Piece(one.id, 1, 0, number, part) for number, part in enumerate(parts)])
    async with worker(redis_db) as running:
        (reply,) = await wait_replies(broker, 1)
        assert running.generation.generated_tokens == 6
    assert reply.outcome.token_ids[:2].tolist() == [0, 1]
    assert len(reply.outcome.token_ids) == 8


@pytest.mark.one_shard
async def test_a_late_copy_of_a_piece_ends_the_chain_and_the_worker_starts_over(broker: Broker, joined) -> None:
    one = job()
    await broker.enqueue([one])
    lease = await joined()
    await lease.claim(1, 9, 0)
    for number in range(3):
        assert await lease.checkpoint([piece(one, number, start=2 * number)]) == ["ok"]
    assert await lease.checkpoint([piece(one, 1, start=2)]) == ["ok"]  # what came after it is not sure any more
    assert await lease.checkpoint([piece(one, 3, start=6)]) == ["gap"]
    (claim,) = await Lease(broker.redis, "default", lease.worker_id).claim(1, 9, 0)
    assert len(claim.partials[0]) == 2


async def test_a_worker_told_of_a_gap_saves_everything_again(redis_db: str, broker: Broker) -> None:
    one = job(sampling=LONG)
    await broker.enqueue([one])
    part = shard_with(broker, one.id)
    async with worker(redis_db, engine=ScriptedEngine(SLOW), checkpoint_s=0.1) as victim:
        await eventually(lambda: saved(broker, one.id, "k0.2"))
        before = sum(_tokens(await record(broker, one.id), 0))
        await part.redis.eval(FORGET, 1, part.keys.job(one.id))
        await eventually(lambda: saved(broker, one.id, "k0.1"))
        await victim.die()
        after = sum(_tokens(await record(broker, one.id), 0))
    assert after >= before > 0
    async with worker(redis_db) as survivor:
        (reply,) = await wait_replies(broker, 1)
        assert survivor.generation.generated_tokens <= 4000 - after
    check_scripted(reply.outcome, 3)


async def test_a_sample_saved_to_its_last_token_still_finds_its_end(redis_db: str, broker: Broker, joined) -> None:
    one = job(sampling=SamplingParams(max_new_tokens=2))
    await left_behind(broker, joined, one, [piece(one, 0)])
    async with worker(redis_db) as running:
        (reply,) = await wait_replies(broker, 1)
        assert running.generation.generated_tokens == 1
    assert (len(reply.outcome.token_ids), reply.outcome.finish_reason) == (2, "length")


@pytest.mark.one_shard
async def test_saved_pieces_count_in_the_pools_bytes(broker: Broker, joined) -> None:
    """Until their sample is published, or starts over, or its job ends."""
    one, other = job(n=2), job()
    await broker.enqueue([one, other])
    lease = await joined()
    await lease.claim(2, 9, 0)
    pieces = [piece(one, 0), piece(one, 1, start=2), piece(one, 0, sample=1), piece(other, 0)]
    size = len(pieces[0].payload)

    async def saved() -> int:
        return (await broker.load()).saved_bytes

    assert await lease.checkpoint(pieces) == ["ok"] * 4
    assert await saved() == sum(len(it.payload) for it in pieces)
    full = Broker(broker.redis, "default", replace(broker.caps, nbytes=(await broker.load()).open_bytes + 2 * size))
    with pytest.raises(PoolBusy, match="pieces, results"):
        await full.enqueue([job()])
    await lease.checkpoint([piece(one, 0)])
    assert await saved() == 3 * size
    await lease.complete([Finished(one.id, 1, 0, result(one, 0))])
    assert await saved() == 2 * size
    await lease.release([Release(one.id, 1, (piece(one, 1, sample=1, start=2),))], 3)
    assert await saved() == 2 * size + len(pieces[1].payload)
    await broker.cancel([one.id])
    assert await saved() == size
    await lease.complete([Finished(other.id, 1, 0, result(other, 0))])
    assert await saved() == 0


@pytest.mark.one_shard
async def test_what_finds_no_room_is_not_saved_and_said_once(
    redis_db: str, broker: Broker, db: Redis, joined, caplog: pytest.LogCaptureFixture
) -> None:
    """A quarter of the pool's bytes, or 1 MiB. The jobs run on, and what is there stays."""
    caps = replace(broker.caps, nbytes=8 << 20)
    first, second = job(sampling=BRIEF), job(sampling=BRIEF)
    await Broker(db, "default", caps).enqueue([first, second])
    lease = await joined()
    await lease.claim(1, 1, 0)
    million = Partial(token_ids=[1] * 130_000, logprobs=[0] * 130_000, segments=(Segment(0, 130_000),))
    for number, state in enumerate(("ok", "ok", "full", "full")):
        large = Piece(first.id, 1, 0, min(number, 2), replace_start(million, 130_000 * min(number, 2)))
        assert await lease.checkpoint([large]) == [state]
    assert (await broker.load()).saved_bytes <= 2 << 20
    await db.hset(broker.keys.load, "saved", 2 << 20)
    async with worker(redis_db, engine=ScriptedEngine(SLOW), checkpoint_s=0.1):
        (reply,) = await wait_replies(broker, 1)
        assert reply.outcome.ok
        assert not await db.hkeys(broker.keys.job(second.id)) or b"k0" not in await db.hkeys(broker.keys.job(second.id))
    said = [record.message for record in caplog.records if "no room" in record.message]
    assert len(said) == 1


def replace_start(partial: Partial, start: int) -> Partial:
    return partial.model_copy(update={"start": start})


class Wide(ScriptedEngine):
    """Tells a row for each token of the job `of`."""

    of = ""

    def progress(self, request_id: str, start: int = 0) -> Generated | None:
        found = super().progress(request_id, start)
        if found is None or not request_id.startswith(self.of):
            return found
        return replace(found, token_arrays={"rows": np.zeros((len(found.token_ids), 4096), np.float32)})


async def test_what_is_too_large_to_be_saved_is_not_and_nobody_else_suffers(
    redis_db: str, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is started over if its worker is lost; a job that ends its worker would end the next one, too."""
    monkeypatch.setattr(codec, "MAX_MESSAGE_BYTES", 16384)
    large, small = (job(sampling=SamplingParams(max_new_tokens=1500)) for _ in range(2))
    engine = Wide(tokens_per_s=SLOW)
    engine.of = large.id
    async with worker(redis_db, engine=engine, checkpoint_s=0.1) as running:
        here = running.id
        await broker.enqueue([large, small])
        await eventually(lambda: saved(broker, small.id))
        hurry(running)
        found = await wait_replies(broker, 2)
        assert {reply.outcome.job_id for reply in found} == {large.id, small.id}
        assert all(reply.outcome.ok for reply in found)
        assert running.id == here
