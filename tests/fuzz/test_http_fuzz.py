"""Broken requests at the gateway's server: none ends in a 5xx, and it needs no more memory after them than before."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.http import Connection

from fuzz.http_requests import send_all

SEED = 20
TESTS = Path(__file__).parents[1]


@pytest.fixture
def process() -> Iterator[tuple[psutil.Process, int]]:
    """The server's process and its port."""
    here = {**os.environ, "PYTHONPATH": ":".join([str(TESTS), *sys.path])}
    command = [sys.executable, "-m", "fuzz.http_process"]
    with subprocess.Popen(command, env=here, stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        yield psutil.Process(started.pid), int(started.stdout.readline())
        started.terminate()
    assert started.returncode == 0


async def healthy(port: int) -> bool:
    connection = Connection(*await asyncio.open_connection("127.0.0.1", port))
    await connection.send(b"GET /health HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
    return (await connection.answer())[0] == 200


async def test_a_thousand_broken_requests(process: tuple[psutil.Process, int]) -> None:
    _, port = process
    outcome = await send_all(port, SEED, range(1000))
    assert outcome.faults == []
    assert {200, 400, 404, 405, 408, 413, 431} <= outcome.statuses.keys()  # they get through to every layer
    assert await healthy(port)


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_fifty_thousand_broken_requests_and_no_growth(process: tuple[psutil.Process, int]) -> None:
    server, port = process
    sizes = []
    for start in range(0, 50_000, 10_000):
        outcome = await send_all(port, SEED, range(start, start + 10_000))
        assert outcome.faults == []
        sizes.append(server.memory_info().rss >> 20)
    assert sizes[-1] - sizes[0] <= 8, f"MiB after each ten thousand: {sizes}"
    assert server.num_fds() < 100
    assert await healthy(port)
