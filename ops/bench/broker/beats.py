"""The heartbeats of many simulated workers, at their real rate, in a process of their own.

`python -m rolloutmq.ops.bench.queue.beats URL WORKERS` beats until its input ends; for each line it reads it prints how
many heartbeats there have been.
"""

from __future__ import annotations

import asyncio
import sys
import time
from asyncio.subprocess import PIPE, Process
from typing import Any, Self

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


class Beater:
    """Beats for `workers` workers, which have joined, inside the `async with` block."""

    def __init__(self, url: str, workers: int) -> None:
        self._command = [sys.executable, "-m", __name__, url, str(workers)]
        self._process: Process | None = None

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(*self._command, stdin=PIPE, stdout=PIPE)
        await self.count()  # it is up
        return self

    async def count(self) -> int:
        """Heartbeats so far."""
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(b"\n")
        return int(await self._process.stdout.readline())

    async def __aexit__(self, *_: object) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()


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
