"""Commands through a pool: who hears them, who answers, when, and what is refused."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from support.pools.pool import eventually, status, worker

from rolloutmq.messages import Broker, Lease
from rolloutmq.messages.broker import command_channel
from rolloutmq.messages.broker.command_channel import CommandBox, CommandSender
from rolloutmq.messages.errors import InvalidField
from rolloutmq.messages.model.command_params import ACTIONS
from rolloutmq.messages.model.commands import Command, CommandReply
from rolloutmq.producer.control import CommandFailed, PoolControl
from rolloutmq.worker.commands import HANDLERS
from rolloutmq.worker.commands.queue import LANES


async def test_every_worker_answers_and_one_that_does_not_is_told_of(
    redis_db: str, control: PoolControl, joined: Any
) -> None:
    await joined("silent")
    async with worker(redis_db) as one, worker(redis_db) as other:
        answers = await control.version(timeout=0.5)
        assert set(answers) == {one.id, other.id, "silent"}
        assert answers[one.id].result["version"] == 0
        assert (answers["silent"].kind, answers["silent"].error) == ("NoAnswer", "no answer within 0.5 s")
        assert not answers.ok
        with pytest.raises(CommandFailed, match="silent: NoAnswer"):
            answers.check()
        only = await control.version(worker_id=other.id)
        assert (set(only), only.ok) == ({other.id}, True)
        assert await control.versions(worker_id=one.id) == {one.id: 0}
    nobody = await control.version(worker_id="nobody")
    assert (len(nobody), nobody.ok) == (0, False)
    with pytest.raises(CommandFailed, match="no worker of that name is alive"):
        nobody.check()


async def more_keys(db: Redis, before: int) -> bool:
    return await db.dbsize() > before


async def test_a_worker_that_dies_is_told_from_one_that_is_slow(
    control: PoolControl, db: Redis, joined: Any, expire_lease: Any
) -> None:
    dying = await joined("dying")
    before = await db.dbsize()
    asked = asyncio.create_task(control.version(timeout=0.5))
    await eventually(lambda: more_keys(db, before), what="the command to be sent")
    await expire_lease(dying)
    assert "its lease is over" in (await asked)["dying"].error


async def test_workers_that_are_gone_are_not_waited_for(
    control: PoolControl, db: Redis, joined: Any, expire_lease: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command_channel, "LOOK_FOR_THEM_S", 0.05)
    monkeypatch.setattr(command_channel, "GONE_S", 0.2)
    dying = await joined("dying")
    before = await db.dbsize()
    asked = asyncio.create_task(control.version(timeout=60.0))
    await eventually(lambda: more_keys(db, before), what="the command to be sent")
    assert not asked.done()
    await expire_lease(dying)
    assert (await asked)["dying"].kind == "NoAnswer"


async def test_a_command_heard_twice_is_done_once(
    redis_db: str, control: PoolControl, db: Redis, broker: Broker
) -> None:
    async with worker(redis_db) as running:
        sender = CommandSender(db, "default")
        sent = await sender.send("flush_cache", timeout_s=10.0)
        for _ in range(3):
            await db.xadd(broker.keys.bell, {"kind": "command", "worker": "", "id": sent.command.id})
        assert (await sender.answers(sent))[running.id].ok
        await control.version()  # whatever was heard before has been taken by now
        assert running.engine.ops.flushes == 1


async def test_what_its_sender_has_given_up_is_not_begun(db: Redis, joined: Any) -> None:
    await joined("w")
    sender = CommandSender(db, "default")
    sent = await sender.send("flush_cache", timeout_s=0.05)
    late = CommandBox(db, "default", "w")
    assert await sender.answers(sent) == {}

    async def over() -> bool:
        return not await db.exists(sender.keys.command(sent.command.id))

    await eventually(over)
    assert await late.take(sent.command.id) is None


async def test_only_workers_that_were_there_take_it_and_the_first_answer_stands(db: Redis, joined: Any) -> None:
    await joined("w")
    sender, late, box = CommandSender(db, "default"), CommandBox(db, "default", "late"), CommandBox(db, "default", "w")
    sent = await sender.send("version")
    await joined("late")
    assert await late.take(sent.command.id) is None
    assert isinstance(await box.take(sent.command.id), Command)
    assert await box.take(sent.command.id) is None
    for ok in (True, False):
        await box.answer(CommandReply(id=sent.command.id, worker_id="w", ok=ok))
    assert (await sender.answers(sent))["w"].ok
    assert await db.ttl(sender.keys.answers(sent.command.id)) > 0
    assert await db.ttl(sender.keys.command(sent.command.id)) > 0


async def test_an_action_that_a_worker_does_not_have_is_answered_with_its_version(redis_db: str, db: Redis) -> None:
    async with worker(redis_db) as running:
        sender = CommandSender(db, "default")
        sent = await sender.send("teleport", timeout_s=5.0)
        answer = (await sender.answers(sent))[running.id]
        assert (answer.ok, answer.kind) == (False, "UnknownAction")
        assert answer.error.startswith("teleport: this worker (rolloutmq ")
        assert "pause" in answer.error


async def test_a_wrong_parameter_is_refused_by_the_sender_and_by_the_worker(
    redis_db: str, control: PoolControl, db: Redis
) -> None:
    with pytest.raises(InvalidField, match=r"tags\.0='lungs'"):
        await control.send("sleep", {"tags": ["lungs"]})
    with pytest.raises(InvalidField, match="speed"):
        await control.send("resume", {"speed": 2})
    with pytest.raises(InvalidField, match="action='teleport'"):
        await control.send("teleport")
    async with worker(redis_db) as running:
        sender = CommandSender(db, "default")
        sent = await sender.send("sleep", {"tags": ["lungs"]}, timeout_s=5.0)
        answer = (await sender.answers(sent))[running.id]
        assert (answer.kind, "tags.0='lungs'" in answer.error) == ("InvalidField", True)


async def test_garbage_for_a_command_is_answered_and_nothing_else_suffers(redis_db: str, db: Redis) -> None:
    async with worker(redis_db) as running:
        sender = CommandSender(db, "default")
        key, id = sender.keys.command("0" * 32), "0" * 32
        await db.hset(key, mapping={"m": b"\x01\x00\x14\xff", f"w:{running.id}": ""})
        await db.pexpire(key, 5000)
        await db.xadd(sender.keys.bell, {"kind": "command", "worker": "", "id": id})
        await eventually(lambda: db.exists(sender.keys.answers(id)))
        sent = await sender.send("version", timeout_s=5.0)
        assert (await sender.answers(sent))[running.id].ok


async def test_an_error_that_is_no_text_is_told_and_the_next_command_is_done(
    redis_db: str, control: PoolControl, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Names of files can be any bytes. What the worker logs of them can be written to a file of text."""
    os.mknod(os.fsencode(tmp_path) + b"/\xff.bin")
    async with worker(redis_db) as running:
        answer = (await control.load(str(tmp_path), 7, timeout=20.0))[running.id]
        assert (answer.kind, "may be a pickle" in answer.error) == ("InvalidField", True)
        assert b"may be a pickle" in caplog.text.encode()
        assert (await control.flush_cache(timeout=5.0)).ok


async def test_questions_and_aborts_do_not_wait_for_slow_work_and_work_is_done_in_order(
    redis_db: str, control: PoolControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    gate = asyncio.Event()
    async with worker(redis_db) as running:
        original = running.engine.operate

        async def operate(operation: str, params: Any) -> Any:
            if operation == "audit":
                await gate.wait()
            done.append(operation)
            return await original(operation, params)

        monkeypatch.setattr(running.engine, "operate", operate)
        audit = asyncio.create_task(control.audit())
        await eventually(running.generation.state.turn.locked)
        flush = asyncio.create_task(control.flush_cache())
        assert (await control.version(timeout=5.0)).ok
        assert (await control.abort(timeout=5.0)).ok
        assert (await control.pause("finish", timeout=5.0)).ok
        assert (await control.resume(timeout=5.0)).ok
        assert done == []
        gate.set()
        assert (await audit).answers.ok
        assert (await flush).ok
        assert done == ["audit", "flush_cache"]


async def test_what_takes_longer_than_it_may_is_told_and_goes_on(
    redis_db: str, control: PoolControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, take = asyncio.Event(), CommandBox.take

    async def hurried(box: CommandBox, command_id: str) -> Command | None:
        taken = await take(box, command_id)
        return taken and taken.model_copy(update={"timeout_s": 0.05})

    monkeypatch.setattr(CommandBox, "take", hurried)
    async with worker(redis_db) as running:
        original, done = running.engine.operate, []

        async def operate(operation: str, params: Any) -> Any:
            await gate.wait()
            done.append(operation)
            return await original(operation, params)

        monkeypatch.setattr(running.engine, "operate", operate)
        assert (await control.flush_cache())[running.id].kind == "CommandTimeout"
        gate.set()
        await eventually(lambda: done == ["flush_cache"])


async def test_a_worker_answers_what_it_has_not_begun_when_it_leaves(
    redis_db: str, control: PoolControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with worker(redis_db) as running:

        async def never(operation: str, params: Any) -> Any:
            await asyncio.Event().wait()

        monkeypatch.setattr(running.engine, "operate", never)
        first = asyncio.create_task(control.flush_cache(timeout=8.0))
        await eventually(running.generation.state.turn.locked)
        second = asyncio.create_task(control.clear_storage(timeout=8.0))
        await eventually(lambda: running.worker._commands._lanes["work"].qsize() == 1)
        await running.stop()
        assert (await second)[running.id].kind == "WorkerLeaves"
        assert (await first)[running.id].kind == "WorkerLeaves"


def test_every_action_has_a_handler_and_a_lane() -> None:
    assert LANES.keys() <= ACTIONS.keys()
    assert HANDLERS.keys() == ACTIONS.keys()


async def test_a_lease_of_another_pool_hears_nothing(redis_db: str, db: Redis) -> None:
    lease = Lease(db, "other", "w")
    await lease.join(status("w"))
    async with PoolControl(redis_db, "default") as control:
        assert len(await control.version(timeout=0.2)) == 0
