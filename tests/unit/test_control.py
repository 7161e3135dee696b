"""The channel into a scheduler's process: every question gets its own answer, or none."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
import torch

from rolloutmq.messages.errors import EngineError
from rolloutmq.sync.receiver import Receiver
from rolloutmq.sync.transfer import TransferReport
from rolloutmq.worker.sglang_control import ControlServer, ask

DONE = TransferReport(ok=True, phase="done")
TORN = TransferReport(ok=False, phase="load", error="torn", intact=False)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path)


async def test_a_commit_is_answered_by_its_own_report(folder: str) -> None:
    server = ControlServer(folder, 0, Receiver(torch.device("cpu")))
    server.post("first", DONE)
    later = asyncio.create_task(ask(folder, 0, {"committed": "second", "timeout_s": 10.0}))
    assert await ask(folder, 0, {"committed": "first", "timeout_s": 10.0}) == DONE
    assert not later.done()
    server.post("second", TORN)
    assert await later == TORN


async def test_who_asks_for_a_commit_that_never_was_is_not_kept(folder: str) -> None:
    ControlServer(folder, 0, Receiver(torch.device("cpu")))
    began = time.monotonic()
    with pytest.raises(EngineError, match="rank 0 does not answer"):
        await ask(folder, 0, {"committed": "never", "timeout_s": 0.2})
    assert time.monotonic() - began < 5


async def test_nobody_listens(folder: str) -> None:
    with pytest.raises(EngineError, match="rank 3 does not answer"):
        await ask(folder, 3, {"committed": "x", "timeout_s": 1.0})


@pytest.mark.parametrize("question", [{}, {"prepare": {"version": 1}}, {"committed": "x"}])
async def test_nonsense_ends_its_connection_and_nothing_else(folder: str, question: dict) -> None:
    server = ControlServer(folder, 0, Receiver(torch.device("cpu")))
    with pytest.raises(EngineError):
        await ask(folder, 0, question)
    server.post("fine", DONE)
    assert await ask(folder, 0, {"committed": "fine", "timeout_s": 5.0}) == DONE
