"""Tools that are hostile to the loop they are called from."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from rolloutmq.messages.model.tools import ToolCall
from rolloutmq.producer.data import ToolRegistry, either, run_tool_calls


def described(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def call(name: str) -> ToolCall:
    return ToolCall(id=name, name=name, arguments={})


async def test_a_tool_that_exits_or_ignores_its_timeout_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(either, "GRACE_S", 0.05)
    end = asyncio.Event()

    async def exits() -> None:
        raise SystemExit(3)

    async def cancels() -> None:
        raise asyncio.CancelledError

    async def stubborn() -> None:
        while not end.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await end.wait()

    registry = ToolRegistry()
    for runner in (exits, cancels, stubborn):
        registry.add(described(runner.__name__), runner)

    class Mute(Exception):
        def __str__(self) -> str:
            raise KeyError("no words")

    async def mute() -> None:
        raise Mute

    registry.add(described("mute"), mute)
    exited, cancelled, mute_one = await run_tool_calls([call("exits"), call("cancels"), call("mute")], registry)
    (late,) = await run_tool_calls([call("stubborn")], registry, timeout=0.05)
    end.set()
    assert mute_one.error == "mute: Mute"
    assert exited.error == "exits: RuntimeError: SystemExit: 3"
    assert cancelled.error == "cancels: RuntimeError: CancelledError: "
    assert late.error == "stubborn did not answer within 0.05 s"
