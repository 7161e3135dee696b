"""Jobs go back: by their worker with what was generated, or taken from a dead one."""

from __future__ import annotations

from redis.asyncio import Redis
from support.pools.pool import dump, letters, replies, status
from support.specimens.messages import job, result

from rolloutmq.messages import Broker, Finished, GenerateJob, Partial, Piece, Release, Segment, decode
from rolloutmq.messages.broker.lease import REAPED

PARTIAL = Partial(token_ids=[7, 8], logprobs=[-0.5, -0.25], segments=(Segment(3, 2),))


async def test_released_with_partials_and_continued_by_another(broker: Broker, db: Redis, joined) -> None:
    one, behind = job(n=3), job()
    await broker.enqueue([one])
    first, second = await joined("w1"), await joined("w2")
    await first.claim(1, 9, 0)
    await broker.enqueue([behind])
    await first.complete([Finished(one.id, 1, 2, result(one, 2))])
    assert await first.release([Release(one.id, 1, (Piece(one.id, 1, 0, 0, PARTIAL),))], 3) == ["ok"]
    assert await first.release([Release(one.id, 1, (Piece(one.id, 1, 0, 0, PARTIAL),))], 3) == ["fenced"]
    (claim, _) = await second.claim(2, 9, 0)
    assert (claim.job_id, claim.attempt, claim.published) == (one.id, 2, {2})  # at the front of the queue again
    assert list(claim.partials) == [0]
    assert [decode(blob, Partial) for blob in claim.partials[0]] == [PARTIAL]
    # the partial goes with the sample
    await second.complete([Finished(one.id, 2, 0, result(one, 0, 2))])
    assert await db.hget(broker.keys.job(one.id), "k0") is None
    await second.complete([Finished(one.id, 2, 1, result(one, 1, 2))])
    assert (await broker.load()).done == 1


async def test_giving_back_without_loss_counts_for_nothing(broker: Broker, joined) -> None:
    one = job()
    await broker.enqueue([one])
    lease = await joined()
    for attempt in range(1, 7):
        (claim,) = await lease.claim(1, 9, 0)
        assert claim.attempt == attempt
        assert await lease.release([Release(one.id, attempt)], 2) == ["ok"]
    assert (await broker.load()).dead == 0


async def test_engine_deaths_and_lost_leases_add_up(broker: Broker, joined, expire_lease) -> None:
    one = job()
    await broker.enqueue([one])
    first, reaper = await joined("w1"), await joined("w2")
    await first.claim(1, 9, 0)
    await first.release([Release(one.id, 1, lost=True)], 2)
    await first.claim(1, 9, 0)
    await expire_lease(first)
    assert await reaper.reap(2) == (0, 1, 0, 1)


async def test_poison_is_buried_and_what_was_published_stands(broker: Broker, db: Redis, joined, expire_lease) -> None:
    poison = job(n=2)
    await broker.enqueue([poison])
    reaper = await joined("reaper")
    for attempt in (1, 2, 3):
        victim = await joined(f"victim-{attempt}")
        (claim,) = await victim.claim(1, 9, 0)
        assert claim.attempt == attempt
        if attempt == 1:
            await victim.complete([Finished(poison.id, 1, 1, result(poison, 1, worker="victim-1"))])
        else:
            assert claim.published == {1}
        await expire_lease(victim)
        assert await reaper.reap(3) == ((1, 0, 0, 1) if attempt < 3 else (0, 1, 0, 1))
    (letter,) = await letters(broker)
    assert (letter.job_id, letter.attempts, letter.host) == (poison.id, 3, "victim-3")
    assert letter.cause == "its worker was lost 3 times"
    assert decode(letter.payload, GenerateJob) == poison
    assert letter.at > 0
    good, failure = [reply.outcome for reply in await replies(broker)]
    assert good == result(poison, 1, worker="victim-1")
    assert (failure.outcome, failure.host, failure.attempts, failure.published) == ("dead", "victim-3", 3, 1)
    assert "samples published=1" in str(failure)
    load = await broker.load()
    assert (load.open_jobs, load.open_bytes, load.dead) == (0, 0, 1)


async def test_reaping_goes_on_where_its_budget_ended(broker: Broker, db: Redis, joined, expire_lease) -> None:
    await broker.enqueue([job() for _ in range(10)])
    dead, reaper = await joined("dead"), await joined("reaper")
    await dead.claim(10, 99, 0)
    await expire_lease(dead)
    assert await reaper.reap(3, budget=6, most_calls=1) == (6, 0, 0, 0)
    assert await reaper.reap(3, budget=6, most_calls=1) == (4, 0, 0, 1)
    assert (await broker.load()).queued == (0, 10, 0)


async def test_one_survivor_takes_back_from_any_number_of_dead_workers(
    broker: Broker, db: Redis, joined, expire_lease
) -> None:
    crowd, per_call = 300, REAPED
    await broker.enqueue([job() for _ in range(crowd)])
    for number in range(crowd):
        dead = await joined(f"dead-{number}")
        assert len(await dead.claim(1, 1, 0)) == 1
        await expire_lease(dead)
    reaper = await joined("reaper")
    assert await reaper.reap(3, most_calls=1) == (per_call // 2, 0, 0, per_call // 2)  # a call is about so many of both
    assert await reaper.reap(3) == (crowd - per_call // 2, 0, 0, crowd - per_call // 2)
    assert len(await reaper.claim(crowd, crowd, 0)) == crowd
    assert await db.zcard(broker.keys.workers) == 1


async def test_leaving_is_refused_while_something_is_held(broker: Broker, db: Redis, joined) -> None:
    one = job()
    await broker.enqueue([one])
    lease = await joined()
    await lease.claim(1, 1, 0)
    before = await dump(db)
    assert await lease.leave() == 1
    assert await dump(db) == before
    await lease.release([Release(one.id, 1)], 3)
    assert await lease.leave() == 0
    assert await lease.leave() == 0
    assert await broker.workers() == []


async def test_burial_says_cause_host_and_error(broker: Broker, joined) -> None:
    one = job(text="x", token_ids=None)
    await broker.enqueue([one])
    lease = await joined()
    await lease.claim(1, 1, 0)
    assert await lease.bury(one.id, 1, "refused", "host-7", "text: no tokenizer" + "!" * 5000)
    assert not await lease.bury(one.id, 1, "refused", "host-7", "again")
    (letter,) = await letters(broker)
    assert (letter.cause, letter.host, len(letter.error)) == ("refused", "host-7", 2000)
    (reply,) = await replies(broker)
    assert reply.outcome.error == letter.error
    assert await lease.held() == frozenset()


async def test_a_status_travels_with_the_heartbeat(broker: Broker, joined) -> None:
    lease = await joined("w1")
    await lease.heartbeat(status("w1", running=5, state="updating", version=7))
    (seen,) = await broker.workers()
    assert (seen.running, seen.state, seen.version) == (5, "updating", 7)
