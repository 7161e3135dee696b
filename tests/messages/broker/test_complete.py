"""Every sample is published exactly once, by whoever holds the job in that very attempt."""

from __future__ import annotations

import pytest
from redis.asyncio import Redis
from support.pools.pool import dump, replies
from support.specimens.messages import job, result

from rolloutmq.messages import Broker, ClientReplaced, Finished, Release


async def test_published_once(broker: Broker, db: Redis, joined) -> None:
    one = job()
    await broker.enqueue([one])
    lease = await joined()
    (claim,) = await lease.claim(1, 1, 0)
    finished = Finished(one.id, claim.attempt, 0, result(one))
    assert await lease.complete([finished]) == ["ok"]
    before = await dump(db)
    assert await lease.complete([finished]) == ["again"]
    assert await lease.complete([finished, finished]) == ["again", "again"]
    assert await dump(db) == before
    assert [reply.outcome for reply in await replies(broker)] == [result(one)]
    load = await broker.load()
    assert (load.open_jobs, load.open_bytes, load.done) == (0, 0, 1)


async def test_the_same_sample_twice_in_one_call(broker: Broker, joined) -> None:
    one = job(n=2)
    await broker.enqueue([one])
    lease = await joined()
    await lease.claim(1, 9, 0)
    finished = Finished(one.id, 1, 1, result(one, 1))
    assert await lease.complete([finished, finished]) == ["ok", "again"]
    assert len(await replies(broker)) == 1


async def test_a_zombie_is_fenced(broker: Broker, joined, expire_lease) -> None:
    one = job()
    await broker.enqueue([one])
    zombie, heir = await joined("zombie"), await joined("heir")
    await zombie.claim(1, 1, 0)
    await expire_lease(zombie)
    assert await heir.reap(3) == (1, 0, 0, 1)
    # fenced already while nobody has it again
    late = Finished(one.id, 1, 0, result(one, worker="zombie"))
    assert await zombie.complete([late]) == ["fenced"]
    (claim,) = await heir.claim(1, 1, 0)
    assert claim.attempt == 2
    assert await zombie.complete([late]) == ["fenced"]
    assert await heir.complete([Finished(one.id, 2, 0, result(one, attempt=2, worker="heir"))]) == ["ok"]
    (reply,) = await replies(broker)
    assert reply.outcome.worker_id == "heir"


async def test_an_earlier_attempt_of_the_same_worker_is_fenced(broker: Broker, joined) -> None:
    one = job(n=2)
    await broker.enqueue([one])
    lease = await joined()
    await lease.claim(1, 9, 0)
    await lease.release([Release(one.id, 1)], 3)
    (claim,) = await lease.claim(1, 9, 0)
    assert claim.attempt == 2
    assert await lease.complete([Finished(one.id, 1, 0, result(one))]) == ["fenced"]
    assert await lease.complete([Finished(one.id, 3, 0, result(one, attempt=3))]) == ["fenced"]
    assert await lease.complete([Finished(one.id, 2, 0, result(one, attempt=2))]) == ["ok"]


async def test_another_worker_is_fenced(broker: Broker, db: Redis, joined) -> None:
    one, nobodys = job(), job()
    await broker.enqueue([one, nobodys])
    await (await joined("w1")).claim(1, 1, 0)
    other = await joined("w2")
    before = await dump(db)
    assert (
        await other.complete(
            [
                Finished(one.id, 1, 0, result(one, worker="w2")),
                Finished(nobodys.id, 0, 0, result(nobodys)),
                Finished(job().id, 1, 0, result(one)),
            ]
        )
        == ["fenced"] * 3
    )
    assert not await other.bury(one.id, 1, "refused", "h", "")
    assert await other.release([Release(one.id, 1)], 3) == ["fenced"]
    assert await dump(db) == before


async def test_a_reply_stream_is_never_trimmed(broker: Broker, db: Redis, joined) -> None:
    jobs = [job() for _ in range(3000)]
    await broker.enqueue(jobs)
    lease = await joined()
    while claims := await lease.claim(256, 256, 0):
        by_id = {one.id: one for one in jobs}
        await lease.complete([Finished(c.job_id, 1, 0, result(by_id[c.job_id])) for c in claims])
    assert await db.xlen(broker.keys.reply("client")) == 3000
    assert 0 < await db.ttl(broker.keys.reply("client")) <= 604800


async def test_who_reads_no_more_acknowledges_nothing(broker: Broker, db: Redis, joined) -> None:
    """The process that opened a client later may not have read what the earlier one would delete."""
    one = job(n=3)
    await broker.enqueue([one])
    lease = await joined()
    await lease.claim(1, 9, 0)
    await lease.complete([Finished(one.id, 1, i, result(one, i)) for i in range(3)])
    first, second, third = await replies(broker)
    earlier = await broker.own_replies("client")
    await broker.ack("client", [first], earlier)
    later = await broker.own_replies("client")
    before = await dump(db)
    with pytest.raises(ClientReplaced):
        await broker.ack("client", [second], earlier)
    assert await dump(db) == before
    await broker.ack("client", [second], later)
    await db.delete(broker.keys.reader("client"))  # after a day nobody else has come
    await broker.ack("client", [third], earlier)
    assert await replies(broker) == []
    assert await broker.unread() == {}
