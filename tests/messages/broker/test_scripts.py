"""What holds for every script: a second run changes nothing, Redis may forget it, and no key is left for ever."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from redis.asyncio import Redis
from support.pools.pool import dump, replies, status
from support.specimens.messages import job, result
from support.specimens.turns import turn

from rolloutmq.messages import Broker, Finished, Lease, Partial, Piece, Release, Segment, WeightAnnouncement
from rolloutmq.messages.broker import RecordedSessions
from rolloutmq.messages.broker.command_channel import CommandBox, CommandSender
from rolloutmq.messages.broker.dead_letters import DeadLetters
from rolloutmq.messages.model.commands import CommandReply
from rolloutmq.messages.scripts import Scripts, calls
from rolloutmq.messages.scripts.calls import Call
from rolloutmq.messages.scripts.source import FOLDER, LIBRARIES
from rolloutmq.sync.transfer.ledger import Ledger, VersionHolder
from rolloutmq.sync.transfer.order import TransferReport

ELSEWHERE = ("lib", "audit_")
"""Scripts of the audit, which only read, and what is no script."""
ALL = {path.stem for path in FOLDER.rglob("*.lua") if not path.name.startswith(ELSEWHERE)}
SAYS_LOOK = ("bell", "transfers", "wake", "news:client", "clock")
LASTING = {"load", "bell", "weights", "holders", "transfers", "dead", "letters", "clock"}
"""The only keys that may outlive everything: counters, bounded bell, newest version and who has it, bounded reports,
dead letters, clock."""


async def recorded(sessions: RecordedSessions) -> None:
    """A session is recorded, taken and forgotten."""
    for number in range(2):
        await sessions.record("default", "s", f"k{number}", turn([1, 2], [3]))
    assert len(await sessions.take("default", "s")) == 2
    assert await sessions.forget("default", "s")


async def tenants(scripts: Scripts) -> None:
    """A request of a gateway's tenant, admitted, kept and settled."""
    *told, day = await scripts.run(calls.admit("tenant", "request", 5, 1, 5, 5, 1, 60_000))
    assert told == [b"ok", 0]
    for back in ("", 3):
        await scripts.run(calls.settle("tenant", 60_000, ("request", back, day)))


async def lifecycle(broker: Broker, joined: Any, expire_lease: Callable[[Lease], Awaitable[None]]) -> None:
    """Every script, every way a job can end, a transfer that commits and one that fails; everybody leaves."""
    jobs = [job(n=2, deadline_s=60.0) for _ in range(6)]
    done, cancelled, buried, expired, crashed, queued = jobs
    worker, dying = await joined("w1"), await joined("w2")
    await broker.enqueue(jobs)
    await worker.claim(4, 99, 0)
    await worker.complete([Finished(done.id, 1, i, result(done, i)) for i in range(2)])
    await broker.cancel([cancelled.id])
    assert await broker.cancel_client("client", queued.id) == 1
    sender, box = CommandSender(broker.redis, "default"), CommandBox(broker.redis, "default", "w1")
    sent = await sender.send("version")
    assert sent.workers == ("w1", "w2")
    assert await box.take(sent.command.id) is not None
    await box.answer(CommandReply(id=sent.command.id, worker_id="w1", ok=True))
    assert await broker.end_overdue() == 0
    await worker.bury(buried.id, 1, "refused", "h", "no")
    await worker.expire(expired.id, 1)
    await dying.claim(4, 99, 0)
    await expire_lease(dying)
    await worker.reap(3)
    (claim,) = await worker.claim(4, 99, 0)
    assert (claim.job_id, claim.attempt) == (crashed.id, 2)
    partial = Partial(token_ids=[1], logprobs=[0.0], segments=(Segment(0, 1),))
    await worker.checkpoint([Piece(crashed.id, 2, 0, 0, partial, streamed=True)])
    await worker.release([Release(crashed.id, 2, (Piece(crashed.id, 2, 1, 0, partial),), lost=True)], 3)
    await worker.heartbeat(status("w1"))
    assert await broker.stop([crashed.id, done.id]) == ["ok", "done"]
    (claim,) = await worker.claim(4, 99, 0)
    assert claim.ending
    await worker.complete([Finished(crashed.id, 3, i, result(crashed, i, 3)) for i in range(2)])

    ledger = Ledger(broker.redis, "default")
    for version, report in (
        (1, TransferReport(True, "done", holder="h:2")),
        (2, TransferReport(False, "verify", "no")),
    ):
        announcement = WeightAnnouncement(
            version=version,
            epoch=await ledger.new_epoch(),
            host="h",
            port=1,
            token="t",
            join_timeout_s=1.0,
            transfer_timeout_s=1.0,
        )
        await ledger.announce(announcement)
        await ledger.report(announcement, "w1", report)
        await ledger.close(announcement, report.ok, VersionHolder(version, "h:1", "t"), {"w2": "is lost"})
    assert [await ledger.reserve(number, "a folder") for number in (2, 3)] + [await ledger.committed()] == [2, 0, 1]
    assert await ledger.holders(1) == (VersionHolder(1, "h:1", "t"), [VersionHolder(1, "h:2", "t")])
    await broker._scripts.run(calls.learn(2, ("a", 1)))  # as a shard that is not the home
    assert [await broker._scripts.run(calls.begin_again(version)) for version in (1, 2)] == [2, 0]
    assert await ledger.newest() == {"": 3, "a": 1}

    await recorded(RecordedSessions(broker))
    await tenants(Scripts(broker.redis, broker.keys))
    await (letters := DeadLetters(broker)).drop(str(await letters.newest_id()))
    outcomes = await replies(broker)
    await broker.ack("client", outcomes)
    await worker.reap(3)
    assert await worker.leave() == 0
    load = await broker.load()
    assert (len(outcomes), load.accepted, load.done, load.cancelled, load.expired, load.dead) == (8, 6, 2, 2, 1, 1)
    assert (load.open_jobs, load.open_bytes) == (0, 0)


async def gateways(scripts: Scripts) -> None:
    """Two gateways, of which one dies, and its request."""
    begin = calls.begin_request("t/r", b"digest", "t/gw1", "0" * 32, b"", 1 << 20, 60_000, b"")
    assert await scripts.run(calls.beat_gateway("gw1", 60_000, "t/gw1", "t/gw1")) == b"alive"
    assert await scripts.run(calls.beat_gateway("gw2", 60_000, "t/gw2", "t/gw2")) == b"alive"
    assert (await scripts.run(begin))[0] == b"new"
    assert await scripts.run(calls.inherit_gateway("t/gw1", "gw2")) == b"no"
    await scripts.run(calls.leave_gateway("t/gw1", "", "-"))
    assert await scripts.run(calls.inherit_gateway("t/gw1", "gw2")) == b"ok"
    assert await scripts.run(calls.beat_gateway("gw1", 60_000, "", "t/gw1")) == b"inherited"
    assert await scripts.run(calls.finish_request("t/r", "0" * 32, b"answer", 60_000)) == [b"kept"]
    await scripts.run(calls.leave_gateway("t/gw1", "gw2", ""))
    await scripts.run(calls.begin_request("t/r2", b"digest", "t/gw2", "1" * 32, b"", 1 << 20, 60_000, b""))
    await scripts.run(calls.finish_request("t/r2", "1" * 32, b"answer", 60_000))
    assert await scripts.run(calls.finish_request("t/r2", "1" * 32, b"", 0)) == [b"kept"]
    await scripts.run(calls.leave_gateway("t/gw2", "", ""))


async def test_sent_twice_is_done_once(
    broker: Broker, db: Redis, joined: Any, expire_lease: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    once = Scripts.run
    seen: set[str] = set()

    async def twice(self: Scripts, call: Call) -> Any:
        seen.add(call.script)
        first = await once(self, call)
        before = await dump(db, SAYS_LOOK)
        second = await once(self, call)
        assert await dump(db, SAYS_LOOK) == before, call.script
        if call.script == "claim":
            assert [part for i, part in enumerate(second[2:]) if i % 7 not in (3, 4)] == [
                part
                for i, part in enumerate(first[2:])
                if i % 7 not in (3, 4)  # but for the times
            ]
        return first

    monkeypatch.setattr(Scripts, "run", twice)
    await lifecycle(broker, joined, expire_lease)
    await gateways(broker._scripts)
    assert seen == ALL


async def test_redis_may_forget_the_scripts(
    broker: Broker, db: Redis, joined: Any, expire_lease: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    once = Scripts.run

    async def forgotten(self: Scripts, call: Call) -> Any:
        await db.script_flush()
        return await once(self, call)

    monkeypatch.setattr(Scripts, "run", forgotten)
    await lifecycle(broker, joined, expire_lease)


async def test_nothing_is_left_for_ever(broker: Broker, db: Redis, joined: Any, expire_lease: Any) -> None:
    await lifecycle(broker, joined, expire_lease)
    for key in await db.keys():
        name = key.decode().removeprefix(broker.keys.prefix)
        assert await db.ttl(key) > 0 or name in LASTING, name
        assert key.decode().startswith("rmq:{default}:")
        assert "worker:" not in name
        assert "held:" not in name
    assert await db.exists(broker.keys.deadlines, broker.keys.workers, *broker.keys.queues) == 0


async def test_the_bell_stays_short(broker: Broker, db: Redis, joined: Any) -> None:
    lease = await joined()
    for _ in range(30):
        jobs = [job() for _ in range(40)]
        await broker.enqueue(jobs)
        await lease.claim(40, 40, 0)
        await broker.cancel([one.id for one in jobs])
    assert await db.xlen(broker.keys.bell) < 700


async def test_a_waiting_worker_is_woken_once(broker: Broker, db: Redis) -> None:
    await broker.enqueue([job()])
    await broker.enqueue([job()])
    assert await db.lrange(broker.keys.wake, 0, -1) == [b"1"]
    assert 0 < await db.ttl(broker.keys.wake) <= 60


async def test_the_wake_up_is_passed_on_while_work_is_left(broker: Broker, db: Redis, joined: Any) -> None:
    await broker.enqueue([job(), job(), job()])
    lease = await joined()
    for left in (2, 1):
        await db.delete(broker.keys.wake)
        assert len(await lease.claim(1, 1, 0)) == 1
        assert await db.llen(broker.keys.wake) == 1, left
    await db.delete(broker.keys.wake)
    await lease.claim(1, 1, 0)
    assert await db.llen(broker.keys.wake) == 0


def test_every_script_has_a_call_and_no_call_lacks_its_script() -> None:
    scripts = {path.stem for path in FOLDER.rglob("*.lua")} - {*LIBRARIES}
    assert {name for name in vars(calls) if name in scripts or (FOLDER / f"{name}.lua").exists()} == scripts


@pytest.mark.parametrize(
    "declared",
    [
        lambda given_to, version, remember_s: None,
        lambda version, given_to: None,
        lambda version, given_to, remember_s, more: None,
    ],
)
def test_a_call_that_differs_from_the_scripts_header_is_no_call(declared: Any) -> None:
    declared.__name__ = "reserve"
    with pytest.raises(TypeError, match=r"reserve.lua takes version, given_to, remember_s; here it is declared with"):
        calls._call(declared)


def test_arguments_go_by_name_or_by_place_and_rows_one_after_the_other() -> None:
    row = ("job", 1, 0, b"bytes")
    assert calls.complete("w1", row, row) == ("complete", ("w1", *row, *row))
    assert calls.expire(attempt=2, job_id="job", worker="w1") == calls.expire("w1", "job", 2)
