"""Clients that hang up free their engine slots at once. A gateway that leaves lets its streams end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from support.gateways import server
from support.pools.pool import Running, eventually, runs, worker

from rolloutmq.messages import connect
from rolloutmq.messages.broker import broker_of
from rolloutmq.ops.gateway import HttpServer
from rolloutmq.ops.gateway.core import Core
from rolloutmq.ops.gateway.requests import Requests
from rolloutmq.worker.scripted.engine import ScriptedEngine

LONG = {"prompt": [1, 2, 3], "max_tokens": 4000, "return_token_ids": True}
Served = tuple[HttpServer, Running]


@pytest.fixture
async def slow(redis_db: str) -> AsyncIterator[Served]:
    """Its worker runs four at a time, each for minutes."""
    engine = ScriptedEngine(tokens_per_s=20.0)
    async with worker(redis_db, engine=engine, max_running=4) as running, server(redis_db) as here:
        yield here, running


@contextlib.asynccontextmanager
async def asking(here: HttpServer, body: dict[str, Any], **headers: str) -> AsyncIterator[asyncio.StreamReader]:
    """A request whose client hangs up at the end of the block, without a word."""
    reader, writer = await asyncio.open_connection("127.0.0.1", here.port)
    content = json.dumps(body).encode()
    lines = [f"content-length: {len(content)}", "host: h", *(f"{name}: {value}" for name, value in headers.items())]
    writer.write(f"POST /v1/completions HTTP/1.1\r\n{chr(10).join(lines)}\r\n\r\n".encode() + content)
    try:
        yield reader
    finally:
        writer.transport.abort()


async def opened(redis: str, count: int) -> bool:
    """Whether the pool has so many jobs that have not ended."""
    async with connect(redis) as connection:
        return (await broker_of(connection, "default").load()).open_jobs == count


async def free(redis: str, running: Running) -> None:
    """Return when the engine runs nothing, and the pool has no job that has not ended."""
    await eventually(lambda: runs(running.engine, 0))
    await eventually(lambda: opened(redis, 0))


@pytest.mark.parametrize(
    "more",
    [{}, {"stream": True}, {"n": 4}, {"n": 4, "stream": True}, {"prompt": [[1], [2]], "n": 2, "session_id": "s"}],
    ids=["plain", "stream", "n", "n-stream", "session"],
)
async def test_who_hangs_up_frees_its_slots(slow: Served, redis_db: str, more: dict[str, Any]) -> None:
    here, running = slow
    count = max(1, more.get("n", 1) * (2 if "prompt" in more else 1))
    async with asking(here, LONG | more) as reader:
        await eventually(lambda: runs(running.engine, count))
        if more.get("stream"):
            await reader.readuntil(b"data: ")
    began = time.monotonic()
    await free(redis_db, running)
    print(f"free after {time.monotonic() - began:.2f} s")  # no bound here: the machine may be busy


@pytest.mark.parametrize("more", [{}, {"stream": True}], ids=["plain", "stream"])
async def test_who_hangs_up_while_it_waits_leaves_the_queue(slow: Served, redis_db: str, more: dict[str, Any]) -> None:
    here, running = slow
    async with asking(here, LONG | {"n": 4}):
        await eventually(lambda: runs(running.engine, 4))
        async with asking(here, LONG | more | {"n": 3}):
            await eventually(lambda: opened(redis_db, 2))
        await eventually(lambda: opened(redis_db, 1))
        assert await runs(running.engine, 4)
    await free(redis_db, running)


async def test_a_request_with_a_key_goes_on_and_its_answer_is_there_later(slow: Served) -> None:
    here, running = slow
    body = LONG | {"max_tokens": 20, "request_id": "r-1", "stream": True}
    async with asking(here, body) as reader:
        await reader.readuntil(b"data: ")
    async with asking(here, body) as reader:
        assert b'"finish_reason":"length"' in await reader.readuntil(b"data: [DONE]")
    assert running.generation.finished == 1


async def test_a_stream_with_a_key_that_redis_broke_off_may_be_asked_for_again(
    slow: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(*_: Any) -> None:
        raise ConnectionError("Redis is away")

    here, _ = slow
    body = LONG | {"max_tokens": 20, "request_id": "r-2", "stream": True}
    with monkeypatch.context() as silent:
        silent.setattr(Core, "stream", away)
        silent.setattr(Requests, "_finish", away)
        async with asking(here, body) as reader:
            assert b" 503 " in await reader.readline()
    async with asking(here, body) as reader:
        assert b'"finish_reason":"length"' in await reader.readuntil(b"data: [DONE]")


async def test_a_gateway_that_leaves_lets_its_streams_end(redis_db: str) -> None:
    async with worker(redis_db, engine=ScriptedEngine(tokens_per_s=20.0)), server(redis_db) as here:
        async with asking(here, LONG | {"max_tokens": 40, "stream": True}, connection="close") as reader:
            await reader.readuntil(b"data: ")
            here.drain(0.0)
            rest = await reader.read()
        assert rest.rstrip().endswith(b"data: [DONE]\n\n\r\n0")
        assert b'"finish_reason":"length"' in rest


async def test_an_answers_body_does_not_wait_behind_its_head(slow: Served) -> None:
    here, _ = slow
    async with asking(here, LONG | {"max_tokens": 1}) as reader:
        await reader.readuntil(b"\r\n\r\n")
        (connection,) = here.server_state.connections
        plain = connection.transport.get_extra_info("socket")  # type: ignore[union-attr]
        assert plain.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
