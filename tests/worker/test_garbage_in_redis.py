"""Whatever somebody has put into Redis, a worker names it once, goes on, and runs the next job."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import pytest
from redis.asyncio import Redis
from support.pools.pool import eventually, wait_replies, worker
from support.specimens.messages import SHORT, job

from rolloutmq.messages import Broker, encode
from rolloutmq.messages.errors import LeaseLost
from rolloutmq.messages.model import WeightAnnouncement
from rolloutmq.messages.redis import Bell, Keys, connect
from rolloutmq.messages.redis.raw import text, whole
from rolloutmq.producer.control import PoolControl
from rolloutmq.worker.lease import Membership
from rolloutmq.worker.loops import undisturbed

BAD = b"\xff\xfe"
NEWER = b"\x09\x00\x05\x80"
"""An announcement of a release to come."""
LAST_ID = "18446744073709551615-18446744073709551615"


@pytest.mark.parametrize(
    ("raw", "found"), [(None, 0), (b"7", 7), (b"-7", -7), (b"", 0), (b"x", 0), (b"7.5", 0), (BAD, 0), (b"9" * 16, 0)]
)
def test_what_is_no_number_counts_as_none(raw: bytes | None, found: int) -> None:
    assert (whole(raw), text(BAD)) == (found, "\ufffd\ufffd")


async def serves(broker: Broker, running: Any) -> None:
    """The worker takes a job that is submitted now, and is the same incarnation."""
    incarnation, before = running.id, await broker.count_replies("client")
    await broker.enqueue([job(sampling=SHORT)])
    await wait_replies(broker, before + 1)
    assert (running.task.done(), running.id) == (False, incarnation)


RINGS: list[dict[Any, Any]] = [
    {BAD: BAD},
    {b"kind": b"cancel"},
    {b"kind": b"cancel", b"ids": BAD},
    {b"kind": b"stop", b"ids": b"\x00 \xff"},
    {b"kind": b"command", b"id": BAD, b"worker": b""},
    {b"kind": BAD, b"id": b""},
    {b"kind": b"weights", b"epoch": b"1", b"told": BAD},
    {b"kind": b"weights", b"epoch": BAD, b"told": b"AAAA"},
    {b"kind": b"weights", b"epoch": b"1", b"told": base64.b64encode(NEWER)},
]


@pytest.mark.parametrize("fields", RINGS, ids=repr)
async def test_no_entry_of_the_bell_ends_a_worker(
    fields: dict[Any, Any], redis_db: str, broker: Broker, control: PoolControl
) -> None:
    async with worker(redis_db) as running:
        for part in broker.parts:
            await part.redis.xadd(part.keys.bell, fields)
        (await control.version()).check()  # the bell tells the worker of it
        await serves(broker, running)


WEIGHTS = ["committed", "digest", "open", "highest", "epochs", "adapter:a", "number:a"]


@pytest.mark.parametrize("field", WEIGHTS)
@pytest.mark.parametrize("content", [b"x", BAD, b"1.5", b"9" * 40])
async def test_no_field_of_the_weights_ends_a_worker(field: str, content: bytes, redis_db: str, broker: Broker) -> None:
    async with worker(redis_db) as running:
        for part in broker.parts:
            await part.redis.hset(part.keys.weights, field, content)
        running.worker._follower.poke()
        await eventually(lambda: not running.worker._follower._poked.is_set())
        await serves(broker, running)
    async with worker(redis_db) as running:  # and one that starts there
        await serves(broker, running)


def announcement() -> dict[Any, Any]:
    told = {"host": "127.0.0.1", "port": 1, "join_timeout_s": 600.0, "transfer_timeout_s": 60.0}
    return {"m": encode(WeightAnnouncement(version=1, epoch=1, **told)), "st": "open"}


@pytest.mark.parametrize(
    "damage",
    [{"st": BAD}, {"st": ""}, {"lost": BAD}, {BAD: BAD}, {b"report:" + BAD: BAD}, {"m": BAD}, {"m": NEWER}],
)
async def test_no_transfer_ends_a_worker(damage: dict[Any, Any], redis_db: str, broker: Broker, db: Redis) -> None:
    async with worker(redis_db) as running:
        await db.hset(broker.keys.epoch(1), mapping=announcement() | damage)
        await db.hset(broker.keys.weights, "open", 1)
        running.worker._follower.poke()
        await eventually(lambda: not running.worker._follower._poked.is_set() or running.task.done())
        await serves(broker, running)


@pytest.mark.one_shard
@pytest.mark.parametrize("how", ["a key of another type", "the last id there is"])
async def test_a_bell_that_somebody_broke_is_heard_again_when_it_has_been_mended(
    how: str, redis_db: str, db: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rolloutmq.messages.redis.bell.BLOCK_MS", 20)
    async with connect(redis_db, blocking=True) as blocking:
        bell, heard = Bell(blocking, "default"), list[str]()
        key = Keys("default").bell
        await bell.open()
        listening = asyncio.create_task(bell.listen(lambda ring: heard.append(ring["kind"])))
        await db.xadd(key, {"kind": "one"})
        await eventually(lambda: heard == ["one"])
        if how == "the last id there is":
            await db.xadd(key, {"kind": "two"}, id=LAST_ID)
            await eventually(lambda: heard == ["one", "two"])
            await db.delete(key)
        else:
            await db.delete(key)
            await db.lpush(key, "junk")
            await Bell(blocking, "default").open()
            await db.delete(key)
        await db.xadd(key, {"kind": "three"})
        await eventually(lambda: heard[-1] == "three" or listening.done())
        listening.cancel()


async def test_what_a_loop_did_not_foresee_is_logged_once_and_the_loop_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("rolloutmq.worker.loops.RETRY_S", 0.0)
    troubles = [*[ValueError("here")] * 3, KeyError("there"), LeaseLost("over")]

    async def loop() -> None:
        raise troubles.pop(0)

    with pytest.raises(LeaseLost):
        await undisturbed(loop)
    assert troubles == []
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [ValueError, KeyError]


async def test_a_worker_whose_status_cannot_be_told_gives_its_lease_up_in_time(joined: Any) -> None:
    def no_status() -> Any:
        raise ValueError("no status")

    membership = Membership((await joined("one")).parts[0], 0.01, 3)
    with pytest.raises(LeaseLost):
        await undisturbed(lambda: membership.run(no_status, no_status))
