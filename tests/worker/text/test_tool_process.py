"""Calls of tools are read in another process: what a model wrote cannot keep the worker from renewing its lease."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from support.engines.manual import all_that_can_happen_now
from support.pools.pool import eventually, wait_replies, worker
from support.specimens.messages import SHORT, job

from rolloutmq.messages import Broker, GenerateJob
from rolloutmq.worker.text import tool_calls, tool_process
from rolloutmq.worker.text.tool_process import ToolReader

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}
ROME = '[get_weather(city="Rome")]'
JOB = GenerateJob(token_ids=[1], tools=[WEATHER], tool_parser="function")


@pytest.fixture
async def reader(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ToolReader]:
    monkeypatch.setattr(tool_calls, "find_calls", lambda *_: pytest.fail("read in the worker's process"))
    made = ToolReader()
    yield made
    await made.close()


async def read(reader: ToolReader, text: str) -> list[tuple[str | None, Any, bool]]:
    return [(call.name, call.arguments, call.valid) for call in await reader.calls_in(text, JOB, 3)]


async def test_calls_come_from_another_process_in_the_order_in_which_they_were_asked_for(reader: ToolReader) -> None:
    texts = [f'[get_weather(city="{i}")]' for i in range(5)]
    found = await asyncio.gather(*[read(reader, text) for text in texts], read(reader, "no call"))
    assert found == [*[[("get_weather", {"city": str(i)}, True)] for i in range(5)], []]
    (call,) = await reader.calls_in(ROME, JOB, 3)
    assert call.id == f"call_{JOB.id}_3_0"


async def test_a_text_that_takes_too_long_is_one_invalid_call_and_the_next_one_is_read(
    reader: ToolReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    await read(reader, ROME)
    with monkeypatch.context() as patch:
        patch.setattr(tool_process, "READ_S", 0.0)
        (call,) = await reader.calls_in(ROME, JOB, 3)
    assert (call.valid, call.text, call.id) == (False, ROME, f"call_{JOB.id}_3_0")
    assert "too long" in (call.error or "")
    assert await read(reader, ROME) == [("get_weather", {"city": "Rome"}, True)]


async def test_a_process_that_dies_or_is_not_waited_for_leaves_no_answer_for_the_next_text(reader: ToolReader) -> None:
    await read(reader, ROME)
    asking = asyncio.create_task(read(reader, ROME))
    await all_that_can_happen_now()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert await read(reader, "no call") == []
    reader._process.kill()
    assert [valid for *_, valid in await read(reader, ROME)] == [False]
    assert await read(reader, ROME) == [("get_weather", {"city": "Rome"}, True)]


async def test_a_process_that_was_started_ahead_reads_the_first_text(reader: ToolReader) -> None:
    reader.warm(JOB)
    reader.warm(JOB)
    assert await read(reader, ROME) == [("get_weather", {"city": "Rome"}, True)]
    assert reader._ready == {"function"}


@pytest.mark.slow
async def test_the_process_has_the_parsers_of_sglang(reader: ToolReader) -> None:
    pytest.importorskip("sglang")
    asked = GenerateJob(token_ids=[1], tools=[WEATHER], tool_parser="json")
    text = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    (call,) = await reader.calls_in(text, asked, 0)
    assert (call.name, call.arguments, call.error) == ("get_weather", {"city": "Rome"}, None)


class Says:
    """A tokenizer for a model that always says the same."""

    def encode(self, text: str, *, special: bool = True) -> np.ndarray:
        return np.array([1], np.int32)

    def encode_chat(self, messages: Any, **_: Any) -> np.ndarray:
        return np.array([1], np.int32)

    def decode(self, token_ids: np.ndarray, *, special: bool = False) -> str:
        return ROME


async def test_results_have_the_calls_and_a_drain_waits_for_them(
    redis_db: str, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool_calls, "find_calls", lambda *_: pytest.fail("read in the worker's process"))
    monkeypatch.setattr("rolloutmq.worker.text.check_parser", lambda name: None)
    one = job(tools=[WEATHER], tool_parser="function", n=3, sampling=SHORT)
    monkeypatch.setattr("rolloutmq.worker.jobs.intake._check", lambda *_: None)
    async with worker(redis_db, tokenizer=Says()) as running:  # type: ignore[arg-type]
        await broker.enqueue([one])
        await eventually(lambda: running.worker._outbox.jobs() == {one.id})
    found = [reply.outcome for reply in await wait_replies(broker, 3)]
    for result in found:
        assert [call.arguments for call in result.tool_calls] == [{"city": "Rome"}]
