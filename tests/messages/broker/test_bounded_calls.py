"""What one call of a script does is bounded, whatever the pool holds: Redis does nothing else meanwhile.

benchmarks/worst_calls.py measures the time. Here commands are counted, because that is the same on every machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest
from redis.asyncio import Redis
from support.specimens.messages import job, result

from rolloutmq.messages import Broker, Caps, Finished, Partial, Piece, Segment, encode
from rolloutmq.messages.broker import CommandBox, CommandSender, DeadLetters
from rolloutmq.messages.model import CommandReply, WeightAnnouncement
from rolloutmq.sync.transfer import Ledger, VersionHolder
from rolloutmq.sync.transfer.ledger import ASKED

MB = 1 << 20


async def commands(db: Redis, done: Awaitable[Any]) -> dict[str, int]:
    """How often each command was given meanwhile, also by scripts."""
    await db.config_resetstat()
    await done
    stats = await db.info("commandstats")
    return {name.removeprefix("cmdstat_"): one["calls"] for name, one in stats.items()}


async def write_letters(db: Redis, broker: Broker, count: int, size: int, ms: int = 5) -> None:
    """Dead letters as `dead_letter` writes them."""
    async with db.pipeline(transaction=False) as pipe:
        for number in range(count):
            entry = f"{ms}-{number + 1}"
            fields = {"id": "a" * 32, "cause": "c", "error": "", "host": "", "attempts": 1, "at": 5, "dropped": 0}
            pipe.xadd(broker.keys.dead, fields | {"payload": bytes(size)}, id=entry)
            pipe.zadd(broker.keys.letters, {f"{entry} {size}": ms})
        pipe.hincrby(broker.keys.load, "letters", count * size)
        await pipe.execute()


async def bury(broker: Broker, joined: Any, size: int) -> None:
    await broker.enqueue([job(metadata={"large": "x" * size})])
    lease = await joined("undertaker")
    (claim,) = await lease.claim(1, 1, 0)
    assert await lease.bury(claim.job_id, claim.attempt, "refused", "host", "no")
    await lease.leave()


async def test_a_call_reads_few_bytes_of_dead_letters(db: Redis, broker: Broker) -> None:
    await write_letters(db, broker, 6, 2 * MB)
    letters = DeadLetters(broker)
    calls = await commands(db, letters.page())
    assert calls["evalsha"] >= 3
    assert [head.size for head in await letters.page()] == [2 * MB] * 6
    assert [head.entry_id for head in await letters.page(count=3)] == ["5-6", "5-5", "5-4"]


async def test_small_letters_make_room_for_a_large_one(db: Redis, broker: Broker, joined: Any) -> None:
    await write_letters(db, broker, 1000, 1000)
    await bury(Broker(db, "default", Caps(nbytes=4 * MB)), joined, MB // 2)
    assert (await broker.load()).letter_bytes <= MB
    newest, *_, oldest = await DeadLetters(broker).page(count=1000)
    assert newest.size > MB // 2
    assert oldest.entry_id.startswith("5-")
    assert await DeadLetters(broker).trimmed() < 600


async def test_a_letter_for_which_too_many_would_have_to_go_has_no_payload(
    db: Redis, broker: Broker, joined: Any
) -> None:
    letters = DeadLetters(broker)
    await write_letters(db, broker, 4000, 250)
    tight = Broker(db, "default", Caps(nbytes=4 * MB))
    await bury(tight, joined, MB * 3 // 4)
    assert (await broker.load()).letter_bytes <= MB
    newest = (await letters.page())[0]
    assert (newest.size, newest.dropped > MB // 2) == (0, True)
    assert await letters.trimmed() == 2048
    await bury(tight, joined, MB * 3 // 4)
    assert (await letters.page())[0].size > MB // 2
    assert (await broker.load()).letter_bytes <= MB


async def test_a_counter_that_somebody_has_written_costs_no_letter_its_payload(
    db: Redis, broker: Broker, joined: Any
) -> None:
    await db.hset(broker.keys.load, "letters", 1 << 40)
    await bury(Broker(db, "default", Caps(jobs=100, nbytes=1 << 42)), joined, 100)
    await db.hset(broker.keys.load, "cap", 4 * MB)
    await DeadLetters(broker).drop(str(await DeadLetters(broker).newest_id()))
    await db.hset(broker.keys.load, "letters", MB)
    await bury(Broker(db, "default", Caps(nbytes=4 * MB)), joined, 100)
    assert [head.size > 100 for head in await DeadLetters(broker).page()] == [True]


def pieces(one: Any, sample: int, numbers: range) -> list[Piece]:
    def piece(number: int) -> Partial:
        return Partial(start=number, token_ids=[1], logprobs=[0], segments=(Segment(0, 1),))

    return [Piece(one.id, 1, sample, number, piece(number)) for number in numbers]


async def test_pieces_that_a_call_leaves_go_with_the_record(db: Redis, broker: Broker, joined: Any) -> None:
    one = job(n=11)
    await broker.enqueue([one])
    lease = await joined()
    await lease.claim(1, 99, 0)
    for sample in range(10):
        assert set(await lease.checkpoint(pieces(one, sample, range(512)))) == {"ok"}
    samples = [Finished(one.id, 1, sample, result(one, sample)) for sample in range(11)]
    calls = await commands(db, lease.complete(samples[:10]))
    assert calls["hstrlen"] <= 4096 + 512
    assert (await broker.load()).saved_bytes > 0
    await lease.complete(samples[10:])
    assert (await broker.load()).saved_bytes == 0
    assert await db.hkeys(broker.keys.job(one.id)) == [b"st", b"h"]


async def test_pieces_of_an_ended_job_are_freed_beside_redis_work(db: Redis, broker: Broker, joined: Any) -> None:
    one = job()
    await broker.enqueue([one])
    lease = await joined()
    await lease.claim(1, 99, 0)
    await lease.checkpoint(pieces(one, 0, range(512)))
    calls = await commands(db, broker.cancel([one.id]))
    assert calls["unlink"] == 1  # a thread of its own frees what is large
    assert "del" not in calls


async def test_a_claim_takes_so_many_pieces_at_once(db: Redis, broker: Broker, joined: Any) -> None:
    jobs = [job(n=2) for _ in range(12)]
    await broker.enqueue(jobs)
    frame = encode(Partial(start=0, token_ids=[1], logprobs=[0], segments=(Segment(0, 1),)))
    saved = {f"k0.{number}": frame for number in range(1, 1000)} | {"k0": frame}
    for one in jobs:
        await db.hset(broker.keys.job(one.id), mapping=saved | {"kk": 1000 * len(frame)})
    lease = await joined()
    assert [len(await lease.claim(12, 99, 0)) for _ in range(3)] == [5, 5, 2]


@pytest.mark.parametrize("n", [64, 600])
async def test_samples_that_come_again_are_counted_once_in_a_call(
    db: Redis, broker: Broker, joined: Any, n: int
) -> None:
    one = job(n=n)
    await broker.enqueue([one])
    lease = await joined()
    await lease.claim(1, n, 0)
    samples = [Finished(one.id, 1, sample, result(one, sample)) for sample in range(32)]
    assert set(await lease.complete(samples)) == {"ok"}
    calls = await commands(db, lease.complete(samples))
    assert calls["hmget"] + calls.get("hkeys", 0) <= 32 + 1 + n // 256
    assert set(await lease.complete(samples)) == {"again"}


async def test_what_many_have_is_read_in_parts(db: Redis, broker: Broker, joined: Any) -> None:
    await db.hset(broker.keys.unread, mapping={f"client-{number}": number for number in range(2000)})
    assert sum((await broker.unread()).values()) == 1999 * 1000
    calls = await commands(db, broker.unread())
    assert "hgetall" not in calls
    assert calls["hscan"] >= 4


async def test_a_look_at_the_holders_reads_a_few_of_them(db: Redis, broker: Broker) -> None:
    ledger = Ledger(db, "default")
    told = {f"worker-{number}": VersionHolder(3, f"h:{number}", "t").to_json() for number in range(2000)}
    await db.hset(broker.keys.holders, mapping=told | {"": VersionHolder(3, "trainer:1", "t").to_json()})
    trainer, workers = await ledger.holders(3)
    assert trainer == VersionHolder(3, "trainer:1", "t")
    assert ASKED - 1 <= len(workers) <= ASKED
    calls = await commands(db, ledger.holders(3))
    assert calls.keys() >= {"hrandfield"}
    assert not {"hgetall", "hscan", "hvals"} & calls.keys()


async def test_each_answer_is_read_once_and_by_itself(db: Redis, broker: Broker, joined: Any) -> None:
    workers = [await joined(f"w{number}") for number in range(3)]
    sender = CommandSender(db, "default")
    sent = await sender.send("pause")
    for lease in workers:
        box = CommandBox(db, "default", lease.worker_id)
        await box.answer(CommandReply(id=sent.command.id, worker_id=lease.worker_id, ok=True))
    calls = await commands(db, sender.answers(sent))
    assert calls["hget"] == 3
    assert "hgetall" not in calls


async def test_large_results_are_dropped_a_few_at_a_time(db: Redis, broker: Broker) -> None:
    for _ in range(20):
        await db.xadd(broker.keys.reply("gone"), {"j": "a" * 32, "m": bytes(MB)})
    await db.hset(broker.keys.unread, "gone", 20 * MB)
    dropped = asyncio.ensure_future(broker.drop_replies("gone"))
    calls = await commands(db, dropped)
    assert dropped.result() == 20
    assert calls["xread"] > 20 // 4
    assert await broker.unread() == {}


async def test_the_ledger_remembers_so_many_transfers(db: Redis) -> None:
    ledger = Ledger(db, "default")
    announced = WeightAnnouncement(version=1, epoch=1, host="h", port=1, join_timeout_s=1, transfer_timeout_s=1)
    await ledger.announce(announced)
    await ledger.announce(announced.model_copy(update={"epoch": 2, "version": 2}))
    await ledger.announce(announced.model_copy(update={"epoch": 1025, "version": 3}))
    assert [await ledger.epoch(number) is not None for number in (1, 2, 1025)] == [False, True, True]
