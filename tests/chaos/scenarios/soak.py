"""Minutes without a fault: what grows?"""

from __future__ import annotations

import asyncio
import signal
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from ..context import Chaos
from ..processes import MatrixProcess
from ..scenario import scenario

SHARE = 0.2
"""Of the minutes that the kill matrix goes on."""
MOST = {"worker": 100.0, "client": 250.0, "redis": 250.0}
"""Bytes a sample. The client remembers its last 131,072 jobs, and Redis the jobs of an hour; nothing else may stay."""


@scenario("soak", lossless=True, lease_s=10.0, slow=True, lasts=True, finish_s=300.0)
async def soak(chaos: Chaos) -> None:
    """Every kind of job in every way, one worker, nothing broken. `bytes_per_sample` is the slope of the memory of the
    worker's process, the client's and Redis over the samples, in the second half of the time."""
    chaos.terms = replace(chaos.terms, giving_up=frozenset({"trainer.batches"}))
    worker = await chaos.worker(max_running=256, tokens_per_s=None, tools=True)
    where = (chaos.url, "trainer", str(chaos.rng.random()), str(chaos.directory / "journal"), "trainer")
    client = await MatrixProcess.start("matrix_process", chaos.directory / "trainer.log", *where)
    chaos.clients.append(client)
    seen: list[tuple[int, dict[str, int]]] = []
    end = time.monotonic() + 60 * SHARE * chaos.minutes
    async with chaos.broker() as broker:
        while time.monotonic() < end:
            await asyncio.sleep(0.5)  # between two looks
            memory = [int((await part.redis.info("memory"))["used_memory"]) for part in broker.parts]
            pids = {"worker": worker.pid, "client": client.pid}
            sizes = {name: _resident(pid) for name, pid in pids.items()} | {"redis": sum(memory)}
            seen.append((sum(client.all("taken")), sizes))
    client.signal(signal.SIGTERM)
    chaos.expect(await client.ended(60) == 0, f"the client's trouble: {client.all('trouble')}")
    half = seen[len(seen) // 2 :]
    samples = [count for count, _ in half]
    slopes = {name: float(np.polyfit(samples, [sizes[name] for _, sizes in half], 1)[0]) for name in MOST}
    chaos.notes |= {"samples": samples[-1], "bytes_per_sample": {name: round(it, 1) for name, it in slopes.items()}}
    print("     soak: bytes a sample: " + ", ".join(f"{name} {slope:.1f}" for name, slope in slopes.items()))
    for name, slope in slopes.items():
        chaos.expect(slope <= MOST[name], f"{name} grows by {slope:.0f} bytes a sample, allowed are {MOST[name]:.0f}")


def _resident(pid: int) -> int:
    """Bytes of memory that the process has of its own."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024
