"""One entry that a script cannot write keeps no other back: results, checkpoints and jobs that are handed back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from redis.asyncio import Redis
from redis.exceptions import BusyLoadingError, ReadOnlyError, RedisError, ResponseError
from support.pools.pool import eventually, replies, saved, wait_replies, worker
from support.specimens.messages import SHORT, job, result

from rolloutmq.messages import (
    Broker,
    Finished,
    GenerateJob,
    JobFailure,
    Lease,
    Partial,
    Piece,
    RedisRefused,
    Release,
    SamplingParams,
    Segment,
)
from rolloutmq.messages.errors import RedisUnavailable
from rolloutmq.worker.lease.batches import batches, each, is_about_data
from rolloutmq.worker.lease.handback import _bytes
from rolloutmq.worker.scripted.engine import ScriptedEngine

IN_THE_WAY = "ERR The stream has exhausted the last possible ID script: 1f, on @user_script:40."


@pytest.mark.parametrize(
    ("error", "about_data"),
    [
        (ResponseError(IN_THE_WAY), True),
        (ResponseError("WRONGTYPE Operation against a key script: 1f, on @user_script:40."), True),
        (ResponseError("ERR Error running script (call to f_1f): @user_script:1: WRONGTYPE"), True),
        (ResponseError("BUSY Redis is busy running a script. You can only call SCRIPT KILL or @user_script"), False),
        (ResponseError("ERR max number of clients reached"), False),
        (ReadOnlyError("READONLY script: 1f, on @user_script:40."), False),
        (BusyLoadingError("Redis is loading"), False),
        (RedisRefused("Redis takes no writes", "memory"), False),
        (RedisUnavailable("no answer"), False),
        (OSError("gone"), False),
    ],
)
def test_what_is_about_one_entry_and_what_about_the_server(error: RedisError | OSError, about_data: bool) -> None:
    assert is_about_data(error) == about_data


async def test_of_a_batch_only_the_entries_that_fail_alone_are_left_and_order_is_kept() -> None:
    sent, left = list[int](), list[int]()

    async def send(batch: list[int]) -> None:
        if set(batch) & {2, 5}:
            raise ResponseError(IN_THE_WAY)
        sent.extend(batch)

    await each([1, 2, 3, 4, 5], send, lambda entry, error: left.append(entry))
    assert (sent, left) == ([1, 3, 4], [2, 5])


def in_the_way(monkeypatch: pytest.MonkeyPatch, call: str, job_id: str) -> None:
    """Redis cannot do `call` for this job."""
    original = getattr(Lease, call)

    async def broken(self: Lease, entries: Any, *more: Any) -> Any:
        if any(one.job_id == job_id for one in entries):
            raise ResponseError(IN_THE_WAY)
        return await original(self, entries, *more)

    monkeypatch.setattr(Lease, call, broken)


async def two_jobs(broker: Broker, monkeypatch: pytest.MonkeyPatch, call: str) -> GenerateJob:
    """Enqueues two long jobs; Redis cannot do `call` for the first one. Returns the other."""
    bad, good = (job(sampling=SamplingParams(max_new_tokens=1000)) for _ in range(2))
    in_the_way(monkeypatch, call, bad.id)
    await broker.enqueue([bad, good])
    return good


async def test_a_result_that_cannot_be_published_ends_its_job_and_all_others_are_published(
    redis_db: str, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, good = job(sampling=SHORT), [job(sampling=SHORT, n=2) for _ in range(4)]
    in_the_way(monkeypatch, "complete", bad.id)
    await broker.enqueue([good[0], bad, *good[1:]])
    async with worker(redis_db) as running:
        found = [reply.outcome for reply in await wait_replies(broker, 9)]
        await eventually(lambda: not running.worker._outbox.jobs() and not running.status.held)
    (failure,) = [one for one in found if isinstance(one, JobFailure)]
    assert (failure.job_id, failure.cause) == (bad.id, "cannot be published")
    assert "exhausted" in failure.error


async def test_a_checkpoint_that_cannot_be_saved_keeps_no_other_from_being_saved(
    redis_db: str, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = await two_jobs(broker, monkeypatch, "checkpoint")
    async with worker(redis_db, engine=ScriptedEngine(tokens_per_s=100.0), checkpoint_s=0.1, drain_s=0.0):
        await eventually(lambda: saved(broker, good.id))


async def test_a_job_that_cannot_be_given_back_keeps_no_other(
    redis_db: str, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    await two_jobs(broker, monkeypatch, "release")
    async with worker(redis_db, engine=ScriptedEngine(tokens_per_s=1.0), drain_s=0.0) as running:
        await eventually(lambda: running.generation.running == 2)
    assert sum((await broker.load()).queued) == 1


@pytest.mark.one_shard
async def test_a_job_that_cannot_even_be_given_up_keeps_no_other(broker: Broker, db: Redis, joined: Any) -> None:
    """Its client's stream takes nothing, nor do the dead letters: the script fails as a whole."""
    mine, others = job(reply_to="mine"), job(reply_to="other")
    await broker.enqueue([mine, others])
    lease = await joined()
    await lease.claim(2, 9, 0)
    for key in (broker.keys.reply("mine"), broker.keys.dead):
        await db.xadd(key, {"j": "junk"}, id="18446744073709551615-18446744073709551615")
    left: list[str] = []

    async def send(batch: list[Finished]) -> None:
        await lease.complete(batch)

    await db.execute_command("ACL", "SETUSER", "default", "-rename")
    try:
        finished = [Finished(it.id, 1, 0, result(it, 0)) for it in (mine, others)]
        with pytest.raises(ResponseError, match="exhausted"):
            await send(finished)
        await each(finished, send, lambda one, _: left.append(one.job_id))
    finally:
        await db.execute_command("ACL", "SETUSER", "default", "+rename")
    assert left == [mine.id]
    assert [reply.outcome.job_id for reply in await replies(broker, "other")] == [others.id]


def test_a_batch_is_bounded_by_bytes_whatever_has_them() -> None:
    arrays = {"hidden": np.zeros((1, 400_000), np.float32)}
    partial = Partial(start=0, token_ids=[1], logprobs=[0], segments=(Segment(0, 1),), token_arrays=arrays)
    large = [Piece("a" * 32, 1, sample, 0, partial) for sample in range(3)]
    releases = [Release("a" * 32, 1, (piece,)) for piece in large]
    assert [len(batch) for batch in batches(releases, _bytes)] == [1, 1, 1]
    assert [len(batch) for batch in batches([Release("a" * 32, 1)] * 300, _bytes)] == [128, 128, 44]
