"""Every kind of key in Redis is broken in several ways while a worker and two clients use the pool: the client that the
key does not belong to gets its results all the same, and so does every job that is submitted afterwards. The client
that it belongs to is told what became of its own jobs, and never waits for ever."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from redis.asyncio import Redis
from support.pools.pool import Running, eventually, runs, worker
from support.specimens.messages import tokens

from rolloutmq import GenerateJob, JobHandle, RolloutClient, SamplingParams
from rolloutmq.messages import Broker, ClientReplaced, Keys
from rolloutmq.messages.broker import CommandSender
from rolloutmq.ops.operations.audit.sweep import Sweep
from rolloutmq.ops.status import pool_state
from rolloutmq.producer.inbox import reader
from rolloutmq.worker.config import WorkerConfig
from rolloutmq.worker.scripted.engine import ScriptedEngine

JUNK = (b"\xff\xfe", b"", b"x", b"9" * 400)
LAST_ID = "18446744073709551615-18446744073709551615"


class Scene:
    """What is in the pool when a key breaks: jobs of the client "owner" that run and that wait, and a command."""

    def __init__(self, keys: Keys, running: Running, job_id: str, command_id: str) -> None:
        self.keys, self.running, self.job_id, self.command_id = keys, running, job_id, command_id


KINDS: dict[str, tuple[str, Callable[[Scene], str]]] = {
    "queues": ("zset", lambda it: it.keys.queues[1]),
    "turns": ("zset", lambda it: it.keys.turns[1]),
    "later": ("zset", lambda it: it.keys.later[1]),
    "prefers": ("zset", lambda it: it.keys.prefers),
    "suspects": ("list", lambda it: it.keys.suspects),
    "ward": ("string", lambda it: it.keys.ward),
    "job": ("hash", lambda it: it.keys.job(it.job_id)),
    "held": ("set", lambda it: it.keys.held(it.running.id)),
    "client": ("set", lambda it: it.keys.client("owner")),
    "worker": ("hash", lambda it: it.keys.worker(it.running.id)),
    "reply": ("stream", lambda it: it.keys.reply("owner")),
    "reader": ("stream", lambda it: it.keys.reader("owner")),
    "news": ("stream", lambda it: it.keys.news("owner")),
    "version": ("hash", lambda it: it.keys.version(1)),
    "epoch": ("hash", lambda it: it.keys.epoch(1)),
    "command": ("hash", lambda it: it.keys.command(it.command_id)),
    "answers": ("hash", lambda it: it.keys.answers(it.command_id)),
    "sessions": ("zset", lambda it: it.keys.sessions),
    "session": ("hash", lambda it: it.keys.session("default/s")),
    "workers": ("zset", lambda it: it.keys.workers),
    "deadlines": ("zset", lambda it: it.keys.deadlines),
    "clock": ("hash", lambda it: it.keys.clock),
    "load": ("hash", lambda it: it.keys.load),
    "needs": ("hash", lambda it: it.keys.needs),
    "takers": ("hash", lambda it: it.keys.takers),
    "unread": ("hash", lambda it: it.keys.unread),
    "wake": ("list", lambda it: it.keys.wake),
    "token": ("list", lambda it: it.keys.token(it.running.id)),
    "bell": ("stream", lambda it: it.keys.bell),
    "dead": ("stream", lambda it: it.keys.dead),
    "letters": ("zset", lambda it: it.keys.letters),
    "mark": ("string", lambda it: it.keys.mark),
    "scaler": ("string", lambda it: it.keys.scaler),
    "starting": ("hash", lambda it: it.keys.starting),
    "weights": ("hash", lambda it: it.keys.weights),
    "holders": ("hash", lambda it: it.keys.holders),
    "transfers": ("stream", lambda it: it.keys.transfers),
    "request": ("hash", lambda it: it.keys.request("default/request")),
    "answered": ("zset", lambda it: it.keys.answered),
    "gateways": ("hash", lambda it: it.keys.gateways),
    "gateway": ("string", lambda it: it.keys.gateway("gw")),
    "spent": ("hash", lambda it: it.keys.spent("tenant")),
    "admitted": ("zset", lambda it: it.keys.admitted("tenant")),
    "paused": ("hash", lambda it: it.keys.paused),
}
UNCOUNTED = {
    "ward",
    "reader",
    "session",
    "version",
    "epoch",
    "token",
    "bell",
    "mark",
    "scaler",
    "starting",
    "holders",
    "transfers",
    "request",
    "answered",
    "gateways",
    "gateway",
    "spent",
    "admitted",
    "paused",
}
"""Of a wrong type they are set aside by whoever uses them next, which here may be nobody."""
WAYS = ("wrong type", "missing", "garbage", "huge")


async def named(db: Redis, key: str) -> bool:
    """Whether the audit names what is, or was, in the way under this key."""
    name = key.partition(":")[2].partition(":")[2]
    found = await Sweep(db, "default", lambda *_: None, 0.01, 1000).run()
    names = {(one["kind"], one["key"]) for one in found["violations"]}
    return bool(names & {("set_aside", f"aside:{name}"), ("wrong_type", name)})


async def set_aside(redis_db: str) -> int:
    """How many keys `status` says were set aside."""
    return int((await pool_state(redis_db, "default"))["set_aside"])


async def add(db: Redis, kind: str, key: str, junk: bytes) -> None:
    """Put junk into a key of this type."""
    if kind == "list":
        await db.lpush(key, junk)
    elif kind == "set":
        await db.sadd(key, junk)
    elif kind == "zset":
        await db.zadd(key, {junk: 0})
    elif kind == "stream":
        await db.xadd(key, {junk: junk, b"kind": junk, b"j": junk, b"m": junk})
    elif kind == "hash":
        await db.hset(key, junk, junk)
    else:
        await db.set(key, junk)


async def break_key(db: Redis, kind: str, key: str, way: str) -> None:
    """Break a key of a type in one of the WAYS."""
    if way != "wrong type" and (await db.type(key)).decode() != kind:  # broken before, and not used since
        await db.delete(key)
    if way == "wrong type":
        async with db.pipeline(transaction=True) as pipe:  # nobody sees a key that is missing
            pipe.delete(key)
            pipe.lpush(key, "junk") if kind in {"string", "hash"} else pipe.set(key, "junk")
            await pipe.execute()
    elif way == "missing":
        fields = await db.hkeys(key) if kind == "hash" else []
        if fields:
            await db.hdel(key, *sorted(fields)[::2])
        else:
            await db.delete(key)
    elif way == "garbage":
        for junk in JUNK:
            await add(db, kind, key, junk)
        for field in await db.hkeys(key) if kind == "hash" else []:
            await db.hset(key, field, b"\xff\xfe")
    else:
        for number in range(64):
            await add(db, kind, key, b"%d" % number + b"x" * 10_000)
        for field in await db.hkeys(key) if kind == "hash" else []:
            await db.hset(key, field, b"9" * 400)
        if kind == "stream":
            await db.xadd(key, {b"j": b"x"}, id=LAST_ID)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that wait look around often, and workers beat often, without a lease that a busy machine lets run out."""
    monkeypatch.setattr(WorkerConfig, "beat_s", 0.1)
    monkeypatch.setattr(reader, "FIRST_BLOCK_MS", 50)
    monkeypatch.setattr(reader, "LONGEST_BLOCK_MS", 200)


async def owner_is_told(owner: RolloutClient, name: str, mine: GenerateJob, waits: GenerateJob) -> None:
    """A broken record ends its job by itself; all else ends as the owner wants it to."""
    broken = [mine] if name == "job" else []
    await owner.cancel([job.id for job in (mine, waits) if job not in broken])
    for job in (mine, waits):
        ended = await asyncio.wait_for(owner.ending(JobHandle(job.id, job.group, job.n, "q")), 15)
        assert [failure.outcome for failure in ended.failures] == ["dead" if job in broken else "cancelled"]


def test_every_kind_of_key_is_broken() -> None:
    kinds = {name for name in dir(Keys) if not name.startswith("_")} - {"pool", "prefix", "shard", "aside"}
    assert kinds == KINDS.keys()


def test_the_guarantees_say_who_is_told_of_each_kind_of_key() -> None:
    page = (Path(__file__).parents[2] / "docs" / "guarantees.md").read_text()
    table = page.partition("| keys | owner | is told |")[2].partition("\n\n")[0]
    kinds = {kind for row in table.splitlines()[2:] for kind in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert kinds == KINDS.keys()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name == "workers" else []) for name in KINDS]
)
@pytest.mark.usefixtures("quick")
async def test_a_broken_key_harms_its_owner_alone(redis_db: str, db: Redis, broker: Broker, name: str) -> None:
    kind, key_of = KINDS[name]
    engine = ScriptedEngine(tokens_per_s=500.0)
    long, short = SamplingParams(max_new_tokens=4000), SamplingParams(max_new_tokens=30)
    async with (
        worker(redis_db, engine=engine, max_running=32, drain_s=0.2) as running,
        RolloutClient(redis_db, client_id="owner") as owner,
        RolloutClient(redis_db, client_id="other") as other,
    ):
        for way in WAYS:
            mine = tokens(sampling=long, deadline_s=600.0, stream=True)
            waits = tokens(min_version=7, deadline_s=600.0)
            try:
                await owner.submit_many([mine, waits])
            except ClientReplaced:  # so a broken `reader` reads: its owner is told
                await broker.enqueue([one.model_copy(update={"reply_to": "owner"}) for one in (mine, waits)])
            theirs = await other.submit(tokens(sampling=short))
            sent = await CommandSender(db, "default").send("version", timeout_s=30.0)
            await eventually(lambda: runs(engine))
            key = key_of(Scene(broker.keys, running, mine.id, sent.command.id))
            await break_key(db, kind, key, way)
            await broker.enqueue([tokens(reply_to="owner", lora="nobody", sampling=short)])  # it is dead-lettered
            after = await other.submit(tokens(sampling=short))
            for handle in (theirs, after):
                results = await asyncio.wait_for(other.wait(handle), 15)
                assert [len(result.token_ids) for result in results] == [30], way
            assert not running.task.done()
            if name != "dead":
                await eventually(lambda: db.xlen(broker.keys.dead), what=f"a dead letter after {way}")
            if way == "wrong type":
                # A key that is set aside while an audit looks may escape that audit.
                await eventually(lambda key=key: named(db, key), what=f"the audit names {key}")
                if name not in UNCOUNTED:
                    await eventually(lambda: set_aside(redis_db), what=f"{key} counted in the pool's status")
            try:
                await owner_is_told(owner, name, mine, waits)
            except ClientReplaced:
                assert name == "reader"
            await db.delete(broker.keys.client("owner"))
        assert other.outstanding == 0
