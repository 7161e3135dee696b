"""Many real workers with scripted engines, and clients, in a few processes. They end with the input of theirs."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Coroutine
from typing import Any

from rolloutmq.worker.config import WorkerConfig
from rolloutmq.worker.scripted import ScriptedEngine
from rolloutmq.worker.text import NoTokenizer
from rolloutmq.worker.worker import Worker

AT_A_TIME = 32
"""So many of a process start at the same time."""
One = Callable[[int, Callable[[], None]], Coroutine[Any, Any, None]]
"""Runs the one with this number, and calls when it is up."""


def shares(count: int, most: int) -> list[int]:
    """How many each process has, if none has more than `most`."""
    return [min(most, count - first) for first in range(0, count, most)]


def work(count: int, config: dict[str, Any], engine: dict[str, Any]) -> None:
    """A process of so many workers."""

    async def one(_number: int, up: Callable[[], None]) -> None:
        worker = Worker(WorkerConfig(**config), ScriptedEngine(echo=True, **engine), NoTokenizer())
        serving = asyncio.create_task(worker.run())
        joined = asyncio.create_task(worker.joined.wait())
        await asyncio.wait({serving, joined}, return_when=asyncio.FIRST_COMPLETED)
        if joined.done():
            up()
        await serving

    run(count, one)


def run(count: int, one: One) -> None:
    """Run so many of them until the input ends. It says so when all are up."""
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_run(count, one))


async def _run(count: int, one: One) -> None:
    ended, starting = asyncio.Event(), asyncio.Semaphore(AT_A_TIME)
    asyncio.get_running_loop().add_reader(sys.stdin, ended.set)
    running: list[asyncio.Task[None]] = []

    async def start(number: int) -> None:
        async with starting:
            up = asyncio.Event()
            running.append(asyncio.create_task(one(number, up.set)))
            await _first(running[-1], asyncio.create_task(up.wait()))

    await asyncio.gather(*map(start, range(count)))
    print("up", flush=True)
    await _first(*running, asyncio.create_task(ended.wait()))


async def _first(*tasks: asyncio.Task[Any]) -> None:
    """Wait for one of them. Raises its error."""
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()
