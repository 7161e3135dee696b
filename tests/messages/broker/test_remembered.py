"""What Redis keeps of what is over: ids of ended jobs, and answers to commands, have a time and a number or size."""

from __future__ import annotations

from typing import Any

import pytest
from redis.asyncio import Redis
from support.specimens.messages import job

from rolloutmq.messages import Broker, Caps
from rolloutmq.messages.broker import CommandBox, command_channel
from rolloutmq.messages.model.commands import CommandReply
from rolloutmq.messages.scripts import Scripts, calls

LEAST = 65_536
"""So many ids of an hour are remembered however small the pool is."""


async def ended(broker: Broker, db: Redis) -> int:
    """A job ends; how long its id is remembered, in seconds."""
    one = job()
    await broker.enqueue([one])
    await broker.cancel([one.id])
    return int(await db.ttl(broker.keys.job(one.id)))


async def test_so_many_ids_of_an_hour_are_remembered_for_an_hour(broker: Broker, db: Redis) -> None:
    """Those that follow are, for a minute; with the next hour it begins again."""
    small = Broker(db, "default", Caps(nbytes=1 << 20))
    assert await ended(small, db) > 3500
    await db.hincrby(broker.keys.load, "accepted", LEAST - 2)
    assert await ended(small, db) > 3500
    assert 50 <= await ended(small, db) <= 60
    assert await ended(broker, db) > 3500  # a larger pool: a quarter of its bytes, at 256 each
    assert 50 <= await ended(small, db) <= 60
    since, _, _ = (await db.hget(broker.keys.load, "hour")).partition(b"@")
    await db.hset(broker.keys.load, "hour", f"{int(since) - 3600}@0")
    assert await ended(small, db) > 3500


@pytest.mark.parametrize("damage", [b"", b"x", b"\xff@", b"9" * 400, b"99999999999999@0", b"1@99999999999999"])
async def test_a_damaged_note_of_the_hour_begins_again(broker: Broker, db: Redis, damage: bytes) -> None:
    await db.hset(broker.keys.load, "hour", damage)
    assert await ended(broker, db) > 3500


async def test_answers_have_a_size_together(
    broker: Broker, db: Redis, joined: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of ten minutes. One that finds no room is an error that says so; short ones always find room."""
    monkeypatch.setattr(command_channel, "MOST_ANSWERS_BYTES", 200_000)
    await joined("w1")
    sender, box = command_channel.CommandSender(db, "default"), CommandBox(db, "default", "w1")

    async def answered(size: int) -> CommandReply:
        sent = await sender.send("version")
        await box.answer(CommandReply(id=sent.command.id, worker_id="w1", ok=True, result={"x": b"x" * size}))
        return (await sender.answers(sent))["w1"]

    assert (await answered(90_000)).ok
    assert (await answered(90_000)).ok
    refused = await answered(90_000)
    assert (refused.ok, refused.kind) == (False, "InvalidField")
    assert "at most 200000 bytes of answers in 600 s" in refused.error
    assert (await answered(100)).ok
    since, _, _ = (await db.hget(broker.keys.load, "answers")).partition(b"@")
    await db.hset(broker.keys.load, "answers", f"{int(since) - 600}@999999")
    assert (await answered(90_000)).ok


async def test_an_answer_sent_twice_counts_once(broker: Broker, db: Redis) -> None:
    scripts = Scripts(db, broker.keys)
    for _ in range(2):
        assert await scripts.run(calls.answer_command("c", "w", b"x" * 100, 600, 1000)) == b"ok"
    assert (await db.hget(broker.keys.load, "answers")).endswith(b"@100")
