"""The channel into a scheduler's process: every question gets its own answer, or none."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
from support.pools.pool import eventually

from rolloutmq.messages.errors import EngineError
from rolloutmq.sync.receive.receiver import Receiver
from rolloutmq.sync.transfer.order import TransferReport
from rolloutmq.worker.sglang.channel import Channel
from rolloutmq.worker.sglang.inside.control import ControlServer

DONE = TransferReport(ok=True, phase="done")
TORN = TransferReport(ok=False, phase="load", error="torn", intact=False)


@pytest.fixture
async def channel(tmp_path: Path) -> AsyncIterator[Channel]:
    made = Channel(str(tmp_path))
    yield made
    made.close()
    await eventually(lambda: not _served(), what="the threads that serve its connections to end")


async def test_a_commit_is_answered_by_its_own_report(channel: Channel) -> None:
    server = ControlServer(channel.folder, 0, Receiver(torch.device("cpu")))
    server.post("first", DONE)
    later = asyncio.create_task(channel.ask(0, {"committed": "second", "timeout_s": 10.0}))
    assert await channel.ask(0, {"committed": "first", "timeout_s": 10.0}) == DONE
    assert not later.done()
    server.post("second", TORN)
    assert await later == TORN


async def test_what_a_commit_has_used_is_freed_behind_its_answer(channel: Channel) -> None:
    server = ControlServer(channel.folder, 0, Receiver(torch.device("cpu")))
    answered, freed = threading.Event(), list[bool]()
    server.receiver.clear_away = lambda: freed.append(answered.wait(10.0))
    server.post("first", DONE)
    assert await channel.ask(0, {"committed": "first", "timeout_s": 10.0}) == DONE
    answered.set()
    await eventually(lambda: freed == [True])


async def test_who_asks_for_a_commit_that_never_was_is_not_kept(
    channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, before = ControlServer(channel.folder, 0, Receiver(torch.device("cpu"))), _served()
    waited: list[float] = []
    monkeypatch.setattr(server._posted, "wait", waited.append)  # returns at once: the time is over
    with pytest.raises(EngineError, match="rank 0 does not answer"):
        await channel.ask(0, {"committed": "never", "timeout_s": 60.0})
    assert len(waited) == 1
    assert 0 < waited[0] <= 60.0, "the time that the question gives, and no longer"
    await eventually(lambda: _served() == before)


async def test_nobody_listens(channel: Channel) -> None:
    with pytest.raises(EngineError, match="rank 3 does not answer"):
        await channel.ask(3, {"committed": "x", "timeout_s": 1.0})


@pytest.mark.parametrize("question", [{}, {"prepare": {"version": 1}}, {"committed": "x"}])
async def test_nonsense_ends_its_connection_and_nothing_else(channel: Channel, question: dict) -> None:
    server = ControlServer(channel.folder, 0, Receiver(torch.device("cpu")))
    with pytest.raises(EngineError):
        await channel.ask(0, question)
    server.post("fine", DONE)
    assert await channel.ask(0, {"committed": "fine", "timeout_s": 5.0}) == DONE


def _served() -> int:
    return sum(thread.name == "rolloutmq-ask" for thread in threading.enumerate())


async def test_a_connection_serves_one_question_after_the_other(channel: Channel) -> None:
    server, before = ControlServer(channel.folder, 0, Receiver(torch.device("cpu"))), _served()
    for number in range(50):
        server.post(f"{number}", DONE)
        assert await channel.ask(0, {"committed": f"{number}", "timeout_s": 5.0}) == DONE
    assert _served() == before + 1


async def test_an_answer_that_nobody_waited_for_is_not_the_next_ones(channel: Channel) -> None:
    server = ControlServer(channel.folder, 0, Receiver(torch.device("cpu")))
    server.post("first", DONE)
    assert await channel.ask(0, {"committed": "first", "timeout_s": 5.0}) == DONE
    given_up = asyncio.create_task(channel.ask(0, {"committed": "late", "timeout_s": 30.0}))
    await eventually(lambda: not channel._idle[0])  # it is asked, on the one connection there is
    given_up.cancel()
    await asyncio.wait({given_up})
    server.post("late", DONE)
    server.post("second", TORN)
    assert await channel.ask(0, {"committed": "second", "timeout_s": 5.0}) == TORN


async def test_who_hangs_up_is_served_no_longer(tmp_path: Path) -> None:
    channel = Channel(str(tmp_path))
    server, before = ControlServer(channel.folder, 0, Receiver(torch.device("cpu"))), _served()
    server.post("first", DONE)
    under_way = asyncio.create_task(channel.ask(0, {"committed": "second", "timeout_s": 5.0}))
    assert await channel.ask(0, {"committed": "first", "timeout_s": 5.0}) == DONE
    channel.close()
    server.post("second", TORN)
    assert await under_way == TORN
    await eventually(lambda: _served() == before)
