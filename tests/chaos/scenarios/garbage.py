"""Garbage in every kind of key: whoever owns the key may suffer, nobody else."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from rolloutmq import GenerateJob
from rolloutmq.messages import Broker
from rolloutmq.messages.codec import MAJOR, MINOR

from ..context import Chaos, until
from ..looks import held, letters, part_of, running
from ..scenario import scenario

FIELDS = ("st", "p", "n", "q", "y", "z", "t", "a", "d")
"""Fields that every job's record has."""
MORE = ("e", "v", "g", "l", "P", "c", "x", "w", "kk", "k0", "k0.x")
"""Fields that some have."""
VALUES = (b"\xff\xfe", b"x", b"", b"-7", b"1e999")
ENDED = {b"done", b"cancelled", b"expired", b"dead"}
TRIES = 10
"""More claims of one broken job than this go round and round."""


@scenario("garbage_in_records", timeout_s=90.0)
async def records(chaos: Chaos) -> None:
    """Every field of a job's record is spoilt or gone, or the record is something else: while the job waits, while it
    runs, and while its worker dies. The sound jobs beside them end as if nothing were."""
    options = {"max_running": 256, "prefetch": 0}
    async with chaos.client(patience=12.0) as trainer, chaos.broker() as broker:
        waiting = await _spoilt(chaos, broker, tokens=10)
        await trainer.submit(chaos.jobs(8, tokens=10))
        victim = await chaos.worker(tokens_per_s=40, **options)
        await trainer.take()
        spoilt = await _enqueue(chaos, broker, len(list(_spoilers(chaos))), tokens=400)
        sound = chaos.jobs(24, tokens=200)
        await trainer.submit(sound)
        everything = [*spoilt, *(job.id for job in sound)]
        await until(lambda: _holds(broker, victim.id, everything), what="the worker to hold the jobs to be spoilt")
        await _spoil(chaos, broker, spoilt)
        heirs = await chaos.start_workers(2, tokens_per_s=400, **options)
        await chaos.died(victim)
        await trainer.take()
        await trainer.submit(chaos.jobs(24, tokens=10))
        await trainer.take()
        await until(lambda: _none_queued(broker), what="every job to be looked at")
        for part in broker.parts:
            await part.redis.delete(part.keys.later[1])  # whoever spoils a job's version lets it wait
        await _set_aside(chaos, broker, [*waiting, *spoilt])
    chaos.expect(all(len(one.all("joined")) == 1 for one in heirs), "a worker lost its lease over garbage")
    chaos.expect(all(one.alive for one in heirs), "a worker ended over garbage")


def _spoilers(chaos: Chaos) -> Iterator[list[tuple[Any, ...]]]:
    """Commands (without the key) that spoil a record, one way each."""
    for field in FIELDS:
        yield [("HDEL", field)]
    for field in (*FIELDS, *MORE):
        yield [("HSET", field, chaos.rng.choice(VALUES))]
    yield [("HSET", "k0", b"\xff" * 9, "kk", 1)]
    yield [("HSET", "s0", 1)]
    yield [("HSET", "s0", 1, "kk", 1)]
    yield [("HSET", "d", 1)]
    yield [("DEL",), ("SET", b"\xff")]
    yield [("DEL",), ("RPUSH", b"\xff")]
    yield [("DEL",)]


async def _enqueue(chaos: Chaos, broker: Broker, count: int, **fields: Any) -> list[str]:
    """Accepted jobs of somebody who never comes for them; they are to be spoilt."""
    jobs = chaos.jobs(count, reply_to="owner", **fields)
    await broker.enqueue(jobs)
    ids = [job.id for job in jobs]
    owners = {"owner", *(value.decode(errors="replace") for value in VALUES)}  # `y` is spoilt, too
    chaos.terms = replace(chaos.terms, tampered=chaos.terms.tampered | set(ids), unread=frozenset(owners))
    return ids


async def _spoil(chaos: Chaos, broker: Broker, ids: list[str]) -> None:
    for job_id, commands in zip(ids, _spoilers(chaos), strict=True):
        its = part_of(broker, job_id)
        for name, *arguments in commands:
            await its.redis.execute_command(name, its.keys.job(job_id), *arguments)


async def _spoilt(chaos: Chaos, broker: Broker, **fields: Any) -> list[str]:
    ids = await _enqueue(chaos, broker, len(list(_spoilers(chaos))), **fields)
    await _spoil(chaos, broker, ids)
    return ids


async def _holds(broker: Broker, worker: str, ids: list[str]) -> bool:
    return set(ids) <= await held(broker, worker)


async def _none_queued(broker: Broker) -> bool:
    return not any([await part.redis.exists(*part.keys.queues, part.keys.suspects) for part in broker.parts])


async def _set_aside(chaos: Chaos, broker: Broker, ids: list[str]) -> None:
    """None of these goes round and round."""
    for job_id in ids:
        its = part_of(broker, job_id)
        if await its.redis.type(its.keys.job(job_id)) == b"hash":
            state, attempt = await its.redis.hmget(its.keys.job(job_id), "st", "a")
            tries = int(attempt) if (attempt or b"").isdigit() else 0
            chaos.expect(state in ENDED or tries <= TRIES, f"{job_id} was claimed {tries} times")


@scenario("garbage_in_the_pools_keys", lossless=True)
async def pools(chaos: Chaos) -> None:
    """On the bell, in the weights' keys, in the indexes and on a client's stream: workers and client serve on."""
    workers = await chaos.start_workers(2, max_running=32, tokens_per_s=200)
    async with chaos.client(patience=12.0) as trainer, chaos.broker() as broker:
        await trainer.submit(chaos.jobs(24, n=2, tokens=40))
        await running(broker, 8)
        strangers = {chaos.job().id for _ in range(3)}
        chaos.terms = replace(chaos.terms, unreadable=frozenset(strangers))
        part = broker.parts[chaos.struck]
        for command in (*_bells(chaos), *_weights(), *_indexes(), *_replies(sorted(strangers))):
            await part.redis.execute_command(command[0], f"{part.keys.prefix}{command[1]}", *command[2:])
            await asyncio.sleep(0.02)  # so that each is looked at by itself
        await trainer.take()
        await trainer.submit(chaos.jobs(24, n=2, tokens=10))
        taken = await trainer.take()
        chaos.expect(all(one.ok for one in taken if one.job_id not in strangers), "a sound job failed")
        for key in (
            "deadlines",
            "prefers",
            "holders",
            "transfers",
            "suspects",
            "later:1",
            "queued:1",
            "turns:1",
            "takers",
            "epoch:7",
            "weights",
            "worker:ghost",
            "held:ghost",
        ):
            await part.redis.delete(f"{part.keys.prefix}{key}")
    chaos.expect(all(len(one.all("joined")) == 1 for one in workers), "a worker lost its lease over garbage")
    chaos.expect(all(one.alive for one in workers), "a worker ended over garbage")


def _bells(chaos: Chaos) -> Iterator[tuple[Any, ...]]:
    for kind in ("weights", "cancel", "command", "worker", "no-such-kind", b"\xff"):
        for field in ("id", "ids", "worker", "version", "epoch", b"\xff"):
            yield "XADD", "bell", "*", "kind", kind, field, chaos.rng.choice([b"\xff\xfe", b"", b"x" * 5000])
    yield "XADD", "bell", "*", b"\xff", b"\xfe"


def _weights() -> Iterator[tuple[Any, ...]]:
    for field in ("committed", "open", "epoch", "digest", "number:a", b"\xff"):
        for value in VALUES:
            yield "HSET", "weights", field, value
    yield "HSET", "epoch:7", b"\xff", b"\xfe", "announcement", b"\xff", "state", b"\xff"
    yield "HSET", "weights", "committed", "0", "open", "7"
    yield "XADD", "bell", "*", "kind", "weights", "epoch", "7"
    yield "DEL", "epoch:7"
    yield "SET", "epoch:7", b"\xff"
    for holder in (b"\xff@\xfe", b"{}", b'{"version":0,"address":"x","token":"x"}'):
        yield "HSET", "holders", b"\xff", holder, "", holder
    yield "XADD", "transfers", "*", b"\xff", b"\xfe", "epoch", "7", "worker", b"\xff", "report", b"\xff"


def _indexes() -> Iterator[tuple[Any, ...]]:
    for ghost in (b"\xff\xfe", b"", b"f" * 32):
        yield "ZADD", "deadlines", "1", ghost
        yield "ZADD", "prefers", "1", ghost
        yield "ZADD", "later:1", "0", ghost
        yield "RPUSH", "suspects", ghost
        yield "ZADD", "queued:1", "0", ghost
        yield "ZADD", "turns:1", "9e99", ghost
        yield "HSET", "takers", ghost, ghost
        yield "ZADD", "workers", "1", b"ghost" + ghost
        yield "SADD", "held:ghost", ghost
    yield "SET", "worker:ghost", b"\xff"


def _replies(strangers: list[str]) -> Iterator[tuple[Any, ...]]:
    """Entries that no script wrote, on the trainer's stream."""
    header = bytes((MAJOR, MINOR, 2))
    deep = header + b"\x81\xa1x" + b"\x91" * 600 + b"\xc0"
    for job, message in zip(strangers, (deep, header + b"\x81" * 600, header + b"\xdf\xff\xff\xff\xff"), strict=True):
        yield "XADD", "reply:trainer", "*", "j", job, "s", "0", "m", message, "l", "1"


@scenario("reply_stream_that_takes_nothing", lossless=True)
async def full_stream(chaos: Chaos) -> None:
    """Clients whose reply stream refuses every entry: it is at its last id, or it is no stream, or its counter is no
    number. Their jobs end with a cause; everybody else's are published meanwhile."""
    spoiling = {
        "at-its-end": ("XADD", "reply:at-its-end", "18446744073709551615-18446744073709551615", "x", "y"),
        "no-stream": ("SET", "reply:no-stream", "x"),
        "no-number": ("HSET", "unread", "no-number", "x"),
    }
    worker = await chaos.worker(max_running=64, tokens_per_s=400)
    async with chaos.client(patience=12.0) as trainer, chaos.broker() as broker:
        broken: list[GenerateJob] = []
        part = broker.parts[chaos.struck]
        for client, (name, key, *arguments) in spoiling.items():
            jobs = [*chaos.jobs(4, n=2, tokens=20, reply_to=client), chaos.job(n=2, tokens=20, reply_to=client)]
            await broker.enqueue(jobs)
            await part.redis.execute_command(name, f"{part.keys.prefix}{key}", *arguments)
            broken += jobs
        chaos.terms = replace(chaos.terms, tampered=frozenset(job.id for job in broken), unread=frozenset(spoiling))
        for _ in range(4):
            await trainer.submit(chaos.jobs(16, n=2, tokens=20))
            await trainer.take()
        await until(lambda: _ended(broker, broken), what="the jobs of the broken streams to end")
        ids = {job.id for job in broken}
        dead = [letter for letter in await letters(broker) if letter.job_id in ids]
        chaos.notes["dead_letters"] = len(dead)
        chaos.expect(all(letter.cause for letter in dead), "a letter has no cause")
    chaos.expect(len(worker.all("joined")) == 1, "the worker lost its lease")


async def _ended(broker: Broker, jobs: list[GenerateJob]) -> bool:
    states = await broker.states([job.id for job in jobs])
    return {state.encode() for state in states.values()} <= ENDED
