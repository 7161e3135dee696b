"""Dead letters, the operator's side: shown without their payloads, requeued as exactly one new job, dropped."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from redis.asyncio import Redis
from support.pools.pool import dump, replies, wait_replies, worker
from support.specimens.messages import job

from rolloutmq import RolloutClient
from rolloutmq.messages import Broker, Caps, GenerateJob, InvalidField, PoolBusy, decode, encode, new_id
from rolloutmq.messages.broker.dead_letters import DeadFilter, DeadLetters, successor, successor_id
from rolloutmq.messages.codec import MAJOR, MINOR
from rolloutmq.messages.errors import CannotRequeue, NoSuchDeadLetter
from rolloutmq.messages.ids import is_id
from rolloutmq.messages.scripts import Scripts
from rolloutmq.messages.scripts.calls import Call


@pytest.fixture
def letters(broker: Broker) -> DeadLetters:
    return DeadLetters(broker)


async def bury(broker: Broker, joined: Any, *jobs: GenerateJob, cause: str = "refused") -> None:
    """Jobs that end as dead letters, in order."""
    await broker.enqueue(jobs)
    lease = await joined("undertaker")
    for claim in await lease.claim(len(jobs), 10_000, 0):
        assert await lease.bury(claim.job_id, claim.attempt, cause, "host", "no")
    await lease.leave()


async def write_letter(db: Redis, broker: Broker, payload: bytes, **fields: Any) -> str:
    entry = {"id": new_id(), "cause": "c", "error": "e", "host": "h", "attempts": 1, "at": 5000, "payload": payload}
    return (await db.xadd(broker.keys.dead, entry | fields)).decode()


async def heads(letters: DeadLetters, newest_first: bool = True, **which: Any) -> list[str]:
    return [head.job_id async for head in letters.find(DeadFilter(**which), newest_first=newest_first)]


async def test_pages_newest_first_without_payloads(broker: Broker, db: Redis, letters: DeadLetters) -> None:
    ids = [await write_letter(db, broker, bytes([i]) * 1000, cause=f"Cause {i % 2}") for i in range(150)]
    page = await letters.page(count=100)
    assert [head.entry_id for head in page] == ids[::-1][:100]
    assert (page[0].size, page[0].head, page[0].cause, page[0].at) == (1000, bytes([149]) * 64, "Cause 1", 5.0)
    assert [head.entry_id for head in await letters.page(before=page[-1].entry_id, count=100)] == ids[::-1][100:]
    assert await letters.count() == 150
    assert await letters.newest_id() == ids[-1]
    everything = await heads(letters, newest_first=False)
    assert len(set(everything)) == 150
    assert everything[::-1] == await heads(letters)
    assert await heads(letters, cause="cAUSE 1") == everything[::-1][::2]
    assert await heads(letters, limit=3) == everything[::-1][:3]
    assert await heads(letters, until=ids[9], newest_first=False) == everything[:10]
    assert await heads(letters, since=int(ids[0].split("-")[0]) / 1000 + 3600) == []
    assert len(await heads(letters, since=int(ids[0].split("-")[0]) / 1000)) == 150


async def test_a_strange_letter_is_shown_and_hides_none(broker: Broker, db: Redis, letters: DeadLetters) -> None:
    await db.xadd(broker.keys.dead, {"x": b"\xff"})
    await write_letter(db, broker, b"", error=b"\xff", at="later", attempts="-")
    (bad, odd) = await letters.page()
    assert (bad.error, bad.at, bad.attempts) == ("\ufffd", 0.0, 0)
    assert (odd.job_id, odd.size) == ("", 0)
    assert (await letters.get(odd.entry_id)).payload == b""
    await letters.drop(odd.entry_id)
    with pytest.raises(NoSuchDeadLetter, match=odd.entry_id):
        await letters.drop(odd.entry_id)
    with pytest.raises(InvalidField, match="entry_id='nonsense'"):
        await letters.get("nonsense")


async def test_requeued_it_is_a_new_job_and_runs_whole(
    broker: Broker, letters: DeadLetters, joined: Any, redis_db: str
) -> None:
    old = job(n=3, metadata={"a": 1}, group_id="g", priority="low")
    await bury(broker, joined, old)
    (head,) = await letters.page()
    new = await letters.requeue(head.entry_id)
    assert is_id(new)
    assert new != old.id
    assert await letters.count() == 0
    async with worker(redis_db):
        got = [reply.outcome for reply in await wait_replies(broker, 1 + 3)]
    assert (got[0].job_id, got[0].outcome) == (old.id, "dead")  # the old one keeps the outcome its client has heard
    assert {(it.job_id, it.sample, it.group_id) for it in got[1:]} == {(new, i, "g") for i in range(3)}
    assert all(it.metadata == {"a": 1, "requeued_from": old.id} for it in got[1:])
    load = await broker.load()
    assert (load.accepted, load.done, load.dead, load.open_jobs) == (2, 1, 1, 0)


async def test_the_client_that_was_told_dead_gets_the_results_of_the_new_job(
    broker: Broker, letters: DeadLetters, joined: Any, redis_db: str
) -> None:
    async with RolloutClient(redis_db, client_id="c") as client:
        handle = await client.submit(token_ids=[1], n=2)
        lease = await joined("undertaker")
        await lease.claim(1, 9, 0)
        await lease.bury(handle.job_id, 1, "refused", "h", "no")
        await lease.leave()
        (failure,) = [outcome async for outcome in client.results(timeout=10)]
        assert failure.outcome == "dead"
        (head,) = await letters.page()
        new = await letters.requeue(head.entry_id)
        async with worker(redis_db):
            await client.submit(token_ids=[2], deadline_s=60)  # so that there is something to wait for
            got = [outcome async for outcome in client.results(timeout=10)]
        assert [one.sample for one in got if one.job_id == new] == [0, 1]
        assert client.repeats == 0


async def test_to_another_client(broker: Broker, letters: DeadLetters, joined: Any, redis_db: str) -> None:
    await bury(broker, joined, job())
    (head,) = await letters.page()
    with pytest.raises(InvalidField, match="reply_to="):
        await letters.requeue(head.entry_id, reply_to="no body")
    new = await letters.requeue(head.entry_id, reply_to="other")
    async with worker(redis_db):
        (got,) = await wait_replies(broker, 1, "other")
    assert got.outcome.job_id == new
    assert len(await replies(broker)) == 1


async def test_twice_at_once_or_sent_twice_it_is_one_job(
    broker: Broker, db: Redis, letters: DeadLetters, joined: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    once = Scripts.run

    async def twice(self: Scripts, call: Call) -> Any:
        first = await once(self, call)
        if call.script != "enqueue":
            return first
        before = await dump(db)
        assert await once(self, call) == [b"q"]
        assert await dump(db) == before
        return first

    await bury(broker, joined, job())
    (head,) = await letters.page()
    monkeypatch.setattr(Scripts, "run", twice)
    done = await asyncio.gather(*(letters.requeue(head.entry_id) for _ in range(10)), return_exceptions=True)
    assert {one for one in done if isinstance(one, str)} == {successor_id(head.entry_id, head.job_id)}
    assert all(isinstance(one, str | NoSuchDeadLetter) for one in done)
    assert (await broker.load()).open_jobs == 1


async def test_the_letter_goes_in_the_step_that_takes_the_job_in(
    broker: Broker, db: Redis, letters: DeadLetters, joined: Any
) -> None:
    """However the new job ends, and however long ago: there is no letter left to make a second one of."""
    await bury(broker, joined, job())
    (head,) = await letters.page()
    new = await letters.requeue(head.entry_id)
    await broker.cancel([new])
    await db.delete(broker.keys.job(new))  # as if its tombstone had expired
    with pytest.raises(NoSuchDeadLetter):
        await letters.requeue(head.entry_id)
    # Read before another requeued it, sent after: the script itself refuses.
    assert await broker.enqueue([job(id=new)], letter=head.entry_id) == ["gone"]
    assert (await broker.load()).open_jobs == 0


async def test_a_busy_pool_leaves_the_letter(db: Redis, broker: Broker, letters: DeadLetters, joined: Any) -> None:
    await bury(broker, joined, job())
    (head,) = await letters.page()
    await broker.enqueue([job()])
    before = await dump(db)
    with pytest.raises(PoolBusy):
        await DeadLetters(Broker(db, "default", Caps(jobs=1))).requeue(head.entry_id)
    assert await dump(db) == before
    assert await letters.requeue(head.entry_id)


NEWER_MINOR = bytes((MAJOR, MINOR + 1, 1)) + encode(job())[3:]


@pytest.mark.parametrize(
    ("payload", "why"),
    [
        (b"", "MalformedMessage: 0 bytes"),
        (b"\x01\x00\x01garbage", "MalformedMessage"),
        (b"\x09\x00\x01\x80", "UnsupportedVersion: message version 9.0"),
        (NEWER_MINOR, "written by a newer release"),
        (encode(job(metadata={str(i): i for i in range(64)})), "InvalidField: metadata"),
        (encode(GenerateJob(token_ids=[1])), "names no client"),
    ],
    ids=["empty", "garbage", "newer-major", "newer-minor", "invalid-field", "no-client"],
)
async def test_what_cannot_be_a_job_says_why_and_stays(
    payload: bytes, why: str, broker: Broker, db: Redis, letters: DeadLetters
) -> None:
    entry = await write_letter(db, broker, payload)
    with pytest.raises(CannotRequeue, match=why):
        await letters.requeue(entry)
    assert (await letters.get(entry)).payload == payload
    assert (await broker.load()).accepted == 0
    await letters.drop(entry)


async def test_only_what_was_set_travels_again(broker: Broker, letters: DeadLetters, joined: Any) -> None:
    old = job()
    await bury(broker, joined, old)
    (head,) = await letters.page()
    new = successor(await letters.get(head.entry_id))
    assert decode(encode(new), GenerateJob).model_fields_set == old.model_fields_set | {"metadata"}


def test_its_id_follows_from_the_letter() -> None:
    one = successor_id("1718000000000-0", "a" * 32)
    assert one == successor_id("1718000000000-0", "a" * 32)
    assert is_id(one)
    assert int(one[:12], 16) == 1718000000000
    assert len({one, successor_id("1718000000000-1", "a" * 32), successor_id("1718000000000-0", "b" * 32)}) == 3
    assert is_id(successor_id(f"{1 << 63}-7", ""))


LARGE, CAP = 1 << 20, 16 << 20


async def kept(broker: Broker, db: Redis) -> int:
    """Bytes of all dead letters, which must be what is counted."""
    entries = await db.xrange(broker.keys.dead)
    names = (b"payload", b"cause", b"host", b"error")
    total = sum(64 + sum(len(fields[name]) for name in names) for _, fields in entries)
    assert (await broker.load()).letter_bytes == total
    return total


async def test_letters_have_a_part_of_the_pools_bytes_and_the_oldest_make_room(
    db: Redis, broker: Broker, letters: DeadLetters, joined: Any
) -> None:
    small = Broker(db, "default", Caps(nbytes=CAP))
    jobs = [job(metadata={"large": "x" * LARGE}) for _ in range(12)]
    for one in jobs:
        await bury(small, joined, one)
        assert await kept(broker, db) <= CAP // 4
    assert await heads(letters) == [one.id for one in jobs[:-4:-1]]
    assert await letters.trimmed() == len(jobs) - 3
    assert len(await replies(broker)) == len(jobs)  # every client was told
    assert int(await db.memory_usage(broker.keys.dead)) < CAP // 2


async def test_letters_count_against_the_pools_bytes_until_they_go(
    db: Redis, broker: Broker, letters: DeadLetters, joined: Any
) -> None:
    await bury(broker, joined, *(job(metadata={"large": "x" * (LARGE // 4)}) for _ in range(3)))
    tight = Broker(db, "default", Caps(nbytes=await kept(broker, db) + LARGE // 8))
    await tight.enqueue([job()])
    with pytest.raises(PoolBusy) as busy:
        await tight.enqueue([job(metadata={"large": "x" * (LARGE // 4)})])
    assert "dead letters and sessions hold" in str(busy.value)
    await letters.drop(str(await letters.newest_id()))
    await kept(broker, db)
    requeued = await letters.requeue(str(await letters.newest_id()))
    assert is_id(requeued)
    await kept(broker, db)
    assert await letters.count() == 1


async def test_a_letter_that_is_too_large_is_kept_without_its_payload_and_says_so(
    db: Redis, broker: Broker, letters: DeadLetters, joined: Any
) -> None:
    one = job(metadata={"large": "x" * (2 * LARGE)})
    await bury(Broker(db, "default", Caps(nbytes=4 * LARGE)), joined, one)
    (head,) = await letters.page()
    assert (head.job_id, head.size, head.dropped) == (one.id, 0, len(encode(one)))
    with pytest.raises(CannotRequeue, match=f"{len(encode(one))} bytes were too many to be kept"):
        await letters.requeue(head.entry_id)
    assert await kept(broker, db) < 200


async def test_no_more_than_the_newest_letters_are_kept(
    db: Redis, broker: Broker, letters: DeadLetters, joined: Any
) -> None:
    ids = [await write_letter(db, broker, b"p") for _ in range(2)]
    await db.zadd(broker.keys.letters, {f"{ids[0]} 65": 1, f"{ids[1]} 65": 2, **{f"1-{i} 0": 3 for i in range(9_998)}})
    await db.hset(broker.keys.load, "letters", 130)
    await bury(broker, joined, job())
    assert (await letters.count(), await letters.trimmed()) == (2, 1)
    assert await db.zcard(broker.keys.letters) == 10_000
