"""What is damaged in Redis, by whomever, ends with its owner: all others are served, and nothing cycles for ever."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from redis.asyncio import Redis
from support.pools.pool import letters, replies, status
from support.specimens.messages import job, result

from rolloutmq.messages import Broker, ClientReplaced, Finished, Lease, LeaseLost, Partial, Piece, Release, Segment

LAST_ID = "18446744073709551615-18446744073709551615"
WRONG = {"wrong type": None, "no": "", "not a number": "x", "too large": "9" * 40}


async def spoil(db: Redis, key: str, damage: str) -> None:
    """Damage a field of a record, or all of it."""
    how, _, field = damage.rpartition(" ")
    if how == "wrong type":
        await db.delete(key)
        await db.lpush(key, "junk")
    elif how == "no":
        await db.hdel(key, field)
    else:
        await db.hset(key, field, WRONG[how])


DAMAGES = [
    "wrong type ",
    *(f"no {field}" for field in ("y", "p", "q", "st", "a", "n", "d", "t", "z")),
    *(f"not a number {field}" for field in ("q", "st", "a", "n", "d", "t", "e", "c", "z", "v", "l", "P", "k0.x", "kk")),
    *(f"too large {field}" for field in ("q", "a", "n", "d", "t", "e", "c", "z", "v", "l", "P")),
]


@pytest.mark.parametrize("damage", DAMAGES)
async def test_a_damaged_queued_job_is_ended_and_the_next_one_runs(
    broker: Broker, db: Redis, joined: Any, damage: str
) -> None:
    one, good = job(deadline_s=600.0), job(reply_to="other")
    await broker.enqueue([one, good])
    await spoil(db, broker.keys.job(one.id), damage)
    lease = await joined()
    taken = await lease.claim(9, 9, 0)
    await lease.complete([Finished(it.job_id, it.attempt, 0, result(job(id=it.job_id), 0)) for it in taken])
    assert good.id in {claim.job_id for claim in taken}
    assert [reply.outcome.job_id for reply in await replies(broker, "other")] == [good.id]
    await lease.heartbeat(status("w1"))
    await lease.reap(3)
    assert await lease.claim(9, 9, 0) == []
    assert await lease.leave() == 0


@pytest.mark.parametrize("damage", DAMAGES)
async def test_a_damaged_running_job_keeps_no_dead_workers_job(
    broker: Broker, db: Redis, joined: Any, expire_lease: Any, damage: str
) -> None:
    one, good = job(n=2, deadline_s=600.0), job(n=2, reply_to="other")
    await broker.enqueue([one, good])
    first, second = await joined("w1"), await joined("w2")
    await first.claim(9, 9, 0)
    await spoil(db, broker.keys.job(one.id), damage)
    partial = Partial(token_ids=[7], logprobs=[-0.5], segments=(Segment(3, 1),))
    await first.checkpoint([Piece(it.id, 1, 1, 0, partial, streamed=True) for it in (one, good)])
    states = await first.complete([Finished(it.id, 1, 0, result(it, 0)) for it in (one, good)])
    assert states[1] == "ok"
    await expire_lease(first)
    await second.reap(3)
    again = {claim.job_id: claim for claim in await second.claim(9, 9, 0)}
    assert again[good.id].attempt == 2
    assert await db.zcard(broker.keys.workers) == 1
    assert await second.release([Release(it, claim.attempt) for it, claim in again.items()], 3) != []
    await broker.stop([one.id, good.id])
    await broker.cancel([one.id, good.id])
    await broker.cancel_client("client")
    assert {reply.outcome.job_id for reply in await replies(broker, "other")} == {good.id}
    assert await second.claim(9, 9, 0) == []
    assert await second.leave() == 0


async def test_a_job_without_a_payload_is_dead_once_and_its_client_is_told(
    broker: Broker, db: Redis, joined: Any
) -> None:
    one = job()
    await broker.enqueue([one])
    await db.hdel(broker.keys.job(one.id), "p")
    lease = await joined()
    for _ in range(3):
        assert await lease.claim(9, 9, 0) == []
    (reply,) = await replies(broker)
    assert (reply.outcome.job_id, reply.outcome.outcome) == (one.id, "dead")
    assert "field p" in reply.outcome.error
    (letter,) = await letters(broker)
    assert letter.job_id == one.id
    load = await broker.load()
    assert (load.open_jobs, load.open_bytes, load.dead) == (0, 0, 1)


@pytest.mark.parametrize(
    "case",
    [
        (1, "queued", {"s0": 1}),
        (2, "queued", {"s0": 1}),
        (2, "queued", {"d": 1}),
        (2, "queued", {"s0": 1, "s1": 1, "d": 2, "kk": 0}),
        (1, "running", {"s0": 1}),
        (1, "running", {"d": 1}),
        (2, "running", {"s1": 1}),
        (2, "running", {"d": 1}),
    ],
)
async def test_a_job_that_miscounts_its_samples_ends_and_its_client_is_told(
    broker: Broker, db: Redis, joined: Any, expire_lease: Any, case: tuple[int, str, dict[str, int]]
) -> None:
    """It is never called done without all of its samples, and no worker gets it again and again."""
    n, when, damage = case
    one = job(n=n)
    await broker.enqueue([one])
    if when == "queued":
        await db.hset(broker.keys.job(one.id), mapping=damage)
    for turn in range(4):
        lease = await joined(f"w{turn}")
        claims = await lease.claim(9, 9, 0)
        if when == "running" and turn == 0:
            await db.hset(broker.keys.job(one.id), mapping=damage)
        for claim in claims:
            left = [sample for sample in range(n) if sample not in claim.published]
            results = [Finished(one.id, claim.attempt, sample, result(one, sample)) for sample in left]
            await lease.complete(results)
        await expire_lease(lease)
        await (await joined("reaper")).reap(9)
    *samples, last = [reply.outcome for reply in await replies(broker)]
    assert last.ok or last.outcome == "dead"
    assert not last.ok or len({it.sample for it in (*samples, last)}) == n
    load = await broker.load()
    assert (load.open_jobs, load.done + load.dead) == (0, 1)
    assert last.ok or "its published samples" in last.error


async def _set_last_id(db: Redis, key: str) -> None:
    await db.execute_command("XSETID", key, LAST_ID)


async def _add_last_entry(db: Redis, key: str) -> None:
    await db.xadd(key, {"j": "junk"}, id=LAST_ID)


@pytest.mark.parametrize("fill", [_set_last_id, _add_last_entry])
async def test_a_full_stream_of_one_client_stops_nobody_and_loses_nothing(
    broker: Broker, db: Redis, joined: Any, fill: Any
) -> None:
    mine, others = job(n=3, reply_to="mine"), job(n=3, reply_to="other")
    await broker.enqueue([mine, others])
    lease = await joined()
    await lease.claim(2, 9, 0)
    assert await lease.complete([Finished(it.id, 1, 0, result(it, 0)) for it in (mine, others)]) == ["ok", "ok"]
    await fill(db, broker.keys.reply("mine"))
    for sample in (1, 2):
        batch = [Finished(it.id, 1, sample, result(it, sample)) for it in (mine, others)]
        assert await lease.complete(batch) == ["ok", "ok"]
    for one in (mine, others):
        found = [reply.outcome for reply in await replies(broker, one.reply_to)]
        assert [it for it in found if it.job_id != "junk"] == [result(one, i) for i in range(3)]


@pytest.mark.parametrize("left", [0, 1, 2, 3])
async def test_an_id_near_the_highest_costs_its_owner_nothing(
    broker: Broker, joined: Any, db: Redis, left: int
) -> None:
    """Redis gives the ids behind it to results, until the highest is used up: these were lost."""
    mine = job(n=9)
    await broker.enqueue([mine])
    lease = await joined()
    await lease.claim(1, 9, 0)
    key = broker.keys.reply(mine.reply_to)
    highest = (1 << 64) - 1
    for sample in range(9):
        if sample in {1, 5}:
            await db.xadd(key, {"j": "junk"}, id=f"{highest}-{highest - left}")
        assert await lease.complete([Finished(mine.id, 1, sample, result(mine, sample))]) == ["ok"]
    found = await replies(broker, mine.reply_to)
    assert [it.outcome for it in found if it.outcome.job_id == mine.id] == [result(mine, i) for i in range(9)]
    assert (await db.hget(broker.keys.load, "aside")) == b"2", "the audit tells of both"


async def test_a_reply_stream_that_nobody_can_mend_ends_its_jobs_only(broker: Broker, db: Redis, joined: Any) -> None:
    mine, others = job(reply_to="mine"), job(reply_to="other")
    await broker.enqueue([mine, others])
    lease = await joined()
    await lease.claim(2, 9, 0)
    await db.xadd(broker.keys.reply("mine"), {"j": "junk"}, id=LAST_ID)
    await db.execute_command("ACL", "SETUSER", "default", "-rename")
    try:
        states = await lease.complete([Finished(it.id, 1, 0, result(it, 0)) for it in (mine, others)])
    finally:
        await db.execute_command("ACL", "SETUSER", "default", "+rename")
    assert states == ["fenced", "ok"]
    (letter,) = await letters(broker)
    assert (letter.job_id, "exhausted" in letter.error) == (mine.id, True)
    assert (await broker.load()).open_jobs == 0


POOL_KEYS = (
    "queue:0", "queued:1", "later:1", "prefers", "suspects", "deadlines", "workers", "worker:w1", "held:w1",
    "client:client", "reply:client", "news:client", "unread", "load", "bell", "dead", "wake", "token:w1", "weights",
    "holders", "transfers", "ward",
)  # fmt: skip


@pytest.mark.parametrize("name", POOL_KEYS)
async def test_a_key_of_a_wrong_type_is_set_aside(broker: Broker, db: Redis, joined: Any, name: str) -> None:
    lease = await joined()
    key = broker.keys.prefix + name
    await broker.enqueue([job(reply_to="other", deadline_s=600.0) for _ in range(2)])
    await db.delete(key)
    await (db.set(key, "junk") if name != "ward" else db.lpush(key, "junk"))
    with contextlib.suppress(LeaseLost):  # where leases are kept there is none; a worker joins again
        await _life(broker, lease)
    await _life(broker, await joined("w2"))
    kept = [found async for found in db.scan_iter(broker.keys.prefix + "aside:*")]
    assert all([await db.ttl(found) > 0 for found in kept])


async def _life(broker: Broker, lease: Lease) -> None:
    """A client of its own is served, whatever became of the others' keys."""
    await lease.claim(9, 99, 0)
    await lease.reap(3)
    one, lost = job(n=2, reply_to="mine"), job(reply_to="mine")
    await broker.enqueue([one, lost])
    if await lease.heartbeat(status(lease.worker_id)) and (taken := await lease.claim(9, 99, 0)):
        attempt = {claim.job_id: claim.attempt for claim in taken}
        partial = Partial(token_ids=[7], logprobs=[-0.5], segments=(Segment(3, 1),))
        await lease.checkpoint([Piece(one.id, attempt[one.id], 1, 0, partial, streamed=True)])
        await lease.complete([Finished(one.id, attempt[one.id], i, result(one, i)) for i in range(2)])
        await lease.bury(lost.id, attempt[lost.id], "refused", "h", "no")
    found = await replies(broker, "mine")
    assert {one.id, lost.id} <= {reply.outcome.job_id for reply in found}
    await broker.ack("mine", found)


@pytest.mark.parametrize("value", ["", "x", "1.5", "9" * 30])
async def test_a_counter_that_is_no_number_begins_again(broker: Broker, db: Redis, joined: Any, value: str) -> None:
    lease = await joined()
    fields = ("jobs", "bytes", "unread", "accepted", "done", "cancelled", "dead", "owed1", "owed2", "numbers")
    await db.hset(broker.keys.load, mapping=dict.fromkeys(fields, value))
    await db.hset(broker.keys.unread, "mine", value)
    await db.hset(broker.keys.weights, mapping={"committed": value, "open": value})
    await _life(broker, lease)
    load = await broker.load()
    assert (load.open_jobs, load.done, load.dead) == (0, 1, 1)
    assert await broker.unread() in ({}, {"mine": 0})


@pytest.mark.parametrize("junk", ["another type", "its last id"])
async def test_a_client_opens_whatever_its_readers_key_is(broker: Broker, db: Redis, junk: str) -> None:
    key = broker.keys.reader("client")
    earlier = await broker.own_replies("client")
    if junk == "another type":
        await db.set(key, "junk")
    else:
        await db.xadd(key, {"r": ""}, id=LAST_ID)
    while (owner := await broker.own_replies("client")) == earlier:
        pass  # ids of entries begin with milliseconds, and "another type" has taken the number behind them away
    assert owner > earlier
    assert await broker.read_replies("client", "0", owner=owner) == []
    with pytest.raises(ClientReplaced):
        await broker.read_replies("client", "0", owner=earlier)
    assert await db.ttl(key) > 0


@pytest.mark.parametrize("when", ["queued", "running"])
@pytest.mark.parametrize(
    "damage",
    [
        "gone",
        "wrong type ",
        *(f"no {field}" for field in ("y", "p", "q", "st", "a", "n", "d", "t")),
        *(f"not a number {field}" for field in ("st", "a", "n", "d", "t", "e")),
    ],
)
async def test_a_client_that_waits_is_told_of_its_damaged_job(
    broker: Broker, db: Redis, joined: Any, damage: str, when: str
) -> None:
    one, good, others = job(deadline_s=600.0), job(), job(reply_to="other")
    await broker.enqueue([one, good, others])
    if when == "running":
        await (await joined()).claim(9, 9, 0)
    if damage == "gone":
        await db.delete(broker.keys.job(one.id))
    else:
        await spoil(db, broker.keys.job(one.id), damage)
    for _ in range(2):
        await broker.look_around("other")
        await broker.look_around("client")
    (failure,) = [reply.outcome for reply in await replies(broker)]
    assert (failure.job_id, failure.outcome) == (one.id, "dead")
    assert "is gone" in failure.error or "of its record is missing" in failure.error
    assert await replies(broker, "other") == []
    assert (await broker.load()).open_jobs == 2
    assert await broker.open_jobs("client") == {good.id: good.group}
    await broker.cancel([good.id, others.id])
    load = await broker.load()
    assert (load.open_jobs, load.open_bytes) == (0, 0)


async def test_what_is_no_job_of_a_client_leaves_its_set(broker: Broker, db: Redis, joined: Any) -> None:
    mine, others = job(), job(reply_to="other")
    await broker.enqueue([mine, others])
    await db.sadd(broker.keys.client("client"), "x", b"\xff\xfe", "9" * 400, others.id)
    await broker.look_around("client")
    assert await broker.open_jobs("client") == {mine.id: mine.group}
    assert await replies(broker) == []
    assert len(await (await joined()).claim(9, 9, 0)) == 2


@pytest.mark.parametrize("lost", ["held:w1", "queued:1", "later:1", "deadlines", "prefers"])
async def test_a_waiting_clients_job_comes_back_into_an_index_that_has_lost_it(
    broker: Broker, db: Redis, joined: Any, expire_lease: Any, lost: str
) -> None:
    first, second = await joined("w1"), await joined("w2")
    needs = {"min_version": 1} if lost == "later:1" else {"prefer_worker": "w1"} if lost == "prefers" else {}
    one = job(deadline_s=600.0, **needs)
    await broker.enqueue([one])
    if lost == "held:w1":
        await first.claim(9, 9, 0)
    elif needs:
        assert await second.claim(9, 9, 0) == []
    assert await db.delete(broker.keys.prefix + lost)
    await broker.look_around("client")
    if lost == "prefers":
        await second.reap(3)
        assert await second.claim(9, 9, 1) == []
        assert await db.zscore(broker.keys.prefers, one.id), "it waits for its worker, and not for ever"
    await expire_lease(first)
    await second.reap(3)
    assert [claim.job_id for claim in await second.claim(9, 9, 1)] == [one.id]
    assert await db.zscore(broker.keys.deadlines, one.id)
    await broker.look_around("client")
    assert await second.held() == {one.id}
