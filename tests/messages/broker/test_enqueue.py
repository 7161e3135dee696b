"""Jobs go in once, in order, or not at all."""

from __future__ import annotations

import pytest
from redis.asyncio import Redis
from support.pools.pool import dump, replies
from support.specimens.messages import job, result

from rolloutmq.messages import Broker, Caps, Finished, GenerateJob, InvalidField, SamplingParams, encode


async def test_an_id_is_accepted_once(broker: Broker, db: Redis) -> None:
    one = job()
    assert await broker.enqueue([one]) == ["new"]
    before = await dump(db)
    assert await broker.enqueue([one]) == ["q"]
    assert await dump(db) == before
    assert (await broker.load()).queued == (0, 1, 0)


async def test_the_id_of_another_open_job_is_refused(broker: Broker, db: Redis) -> None:
    """Another content, or another client: nothing of the batch is accepted, and the open job is as it was."""
    one = job()
    await broker.enqueue([one])
    before = await dump(db)
    for other, says in (
        (job(id=one.id, token_ids=[9]), "another job needs another id"),
        (job(id=one.id, seed=1), "another job needs another id"),
        (one.model_copy(update={"reply_to": "somebody"}), "that client client has open"),
    ):
        with pytest.raises(InvalidField, match=f"id='{one.id}': .*{says}"):
            await broker.enqueue([job(), other])
        assert await dump(db) == before
    twice = job()
    with pytest.raises(InvalidField, match="another job needs another id"):
        await broker.enqueue([twice, job(id=twice.id, n=2)])
    assert await dump(db) == before


async def _end(broker: Broker, joined, jobs: list[GenerateJob], ended: str) -> None:
    """Have these jobs end in this way."""
    await broker.enqueue(jobs)
    if ended == "cancelled":
        await broker.cancel([one.id for one in jobs])
        return
    lease = await joined()
    for claim in await lease.claim(9, 99, 0):
        if ended == "dead":
            await lease.bury(claim.job_id, 1, "refused", "h", "why")
        elif ended == "expired":
            await lease.expire(claim.job_id, 1)
        else:
            await lease.complete([Finished(claim.job_id, 1, 0, result(job(id=claim.job_id)))])


@pytest.mark.parametrize("ended", ["done", "cancelled", "dead", "expired"])
async def test_the_id_of_another_job_that_has_ended_is_refused(broker: Broker, db: Redis, joined, ended: str) -> None:
    """Within the hour for which it is remembered: what ended was another job, and nobody would do this one."""
    one = job(deadline_s=60.0)
    await _end(broker, joined, [one], ended)
    before = await dump(db)
    for change in ({"token_ids": [9]}, {"n": 2}, {"metadata": {"k": 1}}, {"sampling": SamplingParams(top_p=0.5)}):
        other = GenerateJob(**one.model_dump(exclude_unset=True) | change)
        with pytest.raises(InvalidField, match=f"id='{one.id}': .*, which is {ended}: another job needs another id"):
            await broker.enqueue([job(), other])
        assert await dump(db) == before
    assert await broker.enqueue([one]) == [ended]


async def test_a_job_that_has_ended_is_known_however_it_is_written(broker: Broker, joined) -> None:
    """With fields at their default or left out, streamed or not; a long one, too."""
    jobs = [
        job(),
        job(sampling=SamplingParams(max_new_tokens=3)),
        job(token_ids=list(range(40_000)), sampling=SamplingParams()),
        GenerateJob(messages=({"role": "user", "content": "hello"},), reply_to="client"),
    ]
    await _end(broker, joined, jobs, "cancelled")
    same = [GenerateJob(**one.model_dump() | {"stream": True}) for one in jobs[:3]]
    same += [jobs[3].model_copy(update={"stream": True, "n": 1})]
    assert all(encode(one) != encode(other) for one, other in zip(jobs, same, strict=True))
    assert await broker.enqueue(same) == ["cancelled"] * 4
    longer = job(id=jobs[2].id, token_ids=[*range(39_999), 7])
    with pytest.raises(InvalidField, match="another job needs another id"):
        await broker.enqueue([longer])


@pytest.mark.parametrize("field", ["y", "p", "z"])
async def test_an_open_job_whose_record_is_damaged_is_not_taken_for_another(
    broker: Broker, db: Redis, field: str
) -> None:
    one = job()
    await broker.enqueue([one])
    await db.hdel(broker.keys.job(one.id), field)
    with pytest.raises(InvalidField, match="an id that is not in use"):
        await broker.enqueue([one])


async def test_the_same_job_is_known_however_it_is_written(broker: Broker) -> None:
    """With a field at its default or left out: it is one job, also twice in one call."""
    one = job()
    other = GenerateJob(**one.model_dump())
    assert encode(one) != encode(other)
    assert await broker.enqueue([one, other]) == ["new", "q"]
    assert await broker.enqueue([other, job(), one]) == ["q", "new", "q"]
    assert (await broker.load()).open_jobs == 2


async def test_an_id_twice_in_one_batch_counts_once(broker: Broker) -> None:
    one = job()
    assert await broker.enqueue([one, one]) == ["new", "q"]
    load = await broker.load()
    assert (load.open_jobs, load.accepted, load.open_bytes) == (1, 1, len(encode(one)))
    await broker.cancel([one.id])
    load = await broker.load()
    assert (load.open_jobs, load.open_bytes) == (0, 0)


async def test_what_became_of_an_earlier_submission(broker: Broker, joined) -> None:
    jobs = [job() for _ in range(4)]
    await broker.enqueue(jobs)
    lease = await joined()
    first, second, *_ = await lease.claim(2, 100, 0)
    assert await broker.enqueue(jobs[:3]) == ["r", "r", "q"]
    await lease.complete([Finished(first.job_id, 1, 0, result(jobs[0]))])
    await lease.bury(second.job_id, 1, "refused", "h", "why")
    await broker.cancel([jobs[2].id])
    assert await broker.enqueue(jobs) == ["done", "dead", "cancelled", "q"]


async def test_nothing_is_sent_of_what_cannot_be_accepted(broker: Broker, db: Redis) -> None:
    with pytest.raises(InvalidField, match="reply_to"):
        await broker.enqueue([job(reply_to="")])
    with pytest.raises(InvalidField, match="at most 100 bytes"):
        await Broker(db, "default", Caps(payload=100)).enqueue([job(token_ids=list(range(100)))])
    assert await broker.enqueue([]) == []
    assert await dump(db) == {}


async def test_cancel_queued_running_and_ended(broker: Broker, db: Redis, joined) -> None:
    queued, running, ended, unknown = job(), job(), job(), job()
    lease = await joined()
    for one in (running, ended):
        await broker.enqueue([one])
        await lease.claim(1, 1, 0)
    await lease.complete([Finished(ended.id, 1, 0, result(ended))])
    await broker.enqueue([queued])
    ids = [one.id for one in (queued, running, ended, unknown)]
    assert await broker.cancel(ids, "changed my mind") == ["ok", "ok", "done", "unknown"]
    assert await broker.cancel(ids) == ["cancelled", "cancelled", "done", "unknown"]
    assert await broker.cancel([]) == []
    found = {reply.outcome.job_id: reply.outcome for reply in await replies(broker)}
    assert len(found) == 3
    assert found[queued.id].cause == found[running.id].cause == "changed my mind"
    assert found[running.id].attempts == 1
    assert await lease.held() == frozenset()
    rings = [fields for _, fields in await db.xrange(broker.keys.bell)]
    assert {b"kind": b"cancel", b"ids": running.id.encode()} in rings
    # what the worker still publishes is refused, and the cancelled one is not claimed any more
    assert await lease.complete([Finished(running.id, 1, 0, result(running))]) == ["fenced"]
    assert await lease.claim(10, 10, 0) == []
    load = await broker.load()
    assert (load.open_jobs, load.open_bytes, load.cancelled, load.done) == (0, 0, 2, 1)


async def test_pools_do_not_see_each_other(broker: Broker, db: Redis) -> None:
    one = job()
    await broker.enqueue([one])
    other = Broker(db, "other")
    assert await other.enqueue([one]) == ["new"]
    await other.cancel([one.id])
    assert (await broker.load()).open_jobs == 1


async def test_an_entry_nobody_understands_is_a_failure_beside_its_neighbours(broker: Broker, db: Redis) -> None:
    one = job()
    stream = broker.keys.reply("client")
    await db.xadd(stream, {"j": one.id, "m": b"\xff\xff"})
    await db.xadd(stream, {"what": "ever"})
    await db.xadd(stream, {"j": one.id, "m": encode(result(one))})
    bad, odd, good = await replies(broker)
    assert not bad.outcome.ok
    assert bad.outcome.job_id == one.id
    assert not odd.outcome.ok
    assert good.outcome == result(one)
