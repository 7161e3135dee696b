"""The heartbeats of many simulated workers, at their real rate, in a process of their own.

`python -m rolloutmq.ops.bench.broker.beats URL WORKERS` beats until its input ends. It answers each line with how many
heartbeats there have been.
"""

from __future__ import annotations

import asyncio
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from ....messages.broker import Lease
from ....messages.model import WorkerStatus
from ....messages.redis import connect

POOL = "growth"
LEASE_S = 60.0
BEAT_S = 1.0
MAX_LOST = 3
LANES = 8


def fleet(redis: Any, workers: int) -> list[Lease]:
    """The workers' leases, not joined yet."""
    return [Lease(redis, POOL, f"growth-{number:04d}", LEASE_S) for number in range(workers)]


def status(lease: Lease) -> WorkerStatus:
    return WorkerStatus(worker_id=lease.worker_id, host="growth", pid=1, state="serving", version=0)


async def beat(lease: Lease) -> None:
    """What a worker does once a second: renew, and look for workers that are dead."""
    await lease.heartbeat(status(lease))
    await lease.reap(MAX_LOST)


@asynccontextmanager
async def beating(url: str, workers: int) -> AsyncIterator[Callable[[], Awaitable[int]]]:
    """Let another process beat for `workers` workers, which have joined. Yields a function that counts beats."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", __name__, url, str(workers), stdin=PIPE, stdout=PIPE
    )
    stdin, stdout = process.stdin, process.stdout
    assert stdin is not None and stdout is not None  # noqa: PT018 – no test

    async def count() -> int:
        stdin.write(b"\n")
        return int(await stdout.readline())

    try:
        await count()  # it is up
        yield count
    finally:
        stdin.close()
        await process.wait()


async def _beat_on_time(url: str, workers: int) -> None:
    beats, ended = 0, asyncio.Event()

    async def lane(mine: list[Lease]) -> None:
        nonlocal beats
        at = time.monotonic()
        while True:
            for lease in mine:
                at += BEAT_S / len(mine)
                if (pause := at - time.monotonic()) > 0:
                    await asyncio.sleep(pause)
                await beat(lease)
                beats += 1

    def asked() -> None:
        if sys.stdin.readline():
            print(beats, flush=True)
        else:
            ended.set()

    async with connect(url) as redis:
        leases = fleet(redis, workers)
        asyncio.get_running_loop().add_reader(sys.stdin, asked)
        lanes = [asyncio.create_task(lane(leases[start::LANES])) for start in range(min(LANES, workers))]
        over = asyncio.create_task(ended.wait())
        done, _ = await asyncio.wait([over, *lanes], return_when=asyncio.FIRST_COMPLETED)
        for task in [over, *lanes]:
            task.cancel()
        for task in done:
            task.result()  # a lane ends by an error only


if __name__ == "__main__":
    url, workers = sys.argv[1:]
    asyncio.run(_beat_on_time(url, int(workers)))
