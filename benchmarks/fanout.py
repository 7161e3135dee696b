"""What a publication of weights costs as the pool grows: python benchmarks/fanout.py RESULT.json 1,4,16,64

Workers are the real ones with the scripted engine, IN_ONE_PROCESS at a time; the publisher is in this process. The
weights are one tensor of 4 KB, so what is measured is everything but the bytes: the ledger in Redis, the rendezvous
store, and a gloo group of all workers and the trainer. NCCL needs GPUs and is not measured.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import redis
import torch

from rolloutmq import WeightPublisher
from rolloutmq.ops.bench.broker import describe_host
from rolloutmq.ops.redis import EmbeddedRedis
from rolloutmq.worker.config import WorkerConfig
from rolloutmq.worker.scripted import ScriptedEngine
from rolloutmq.worker.text import NoTokenizer
from rolloutmq.worker.worker import Worker

VERSIONS = 8
IN_ONE_PROCESS = 16
TENSOR = "model.embed_tokens.weight"


def measure(url: str, workers: int) -> dict[str, Any]:
    """Publish VERSIONS versions to so many workers. The first one makes the group, the others find it standing."""
    pool, children = f"fanout-{workers}", list[subprocess.Popen[bytes]]()
    try:
        for first in range(0, workers, IN_ONE_PROCESS):
            count = str(min(IN_ONE_PROCESS, workers - first))
            command = [sys.executable, __file__, "workers", url, pool, count]
            children.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        for child in children:
            if not child.stdout or not child.stdout.readline():
                raise SystemExit(f"{workers} workers did not start")
        with redis.Redis.from_url(url) as admin, WeightPublisher(url, pool) as publisher:
            seconds, cpu_ms, calls = list[float](), list[float](), list[int]()
            for version in range(1, VERSIONS + 1):
                cpu, count = spent(admin)
                report = publisher.publish(version, {TENSOR: torch.full((1024,), float(version))}.items()).wait(300)
                if report.state != "committed" or len(report.workers) != workers:
                    raise SystemExit(f"version {version} of {workers} workers: {report}")
                after = spent(admin)
                seconds.append(round(report.seconds, 4))
                cpu_ms.append(round(1000 * (after[0] - cpu), 2))
                calls.append(after[1] - count)
                time.sleep(0.5)
    finally:
        for child in children:
            if child.stdin:
                child.stdin.close()
        for child in children:
            child.wait()
    return {
        "workers": workers,
        "first_s": seconds[0],
        "standing_s": statistics.median(seconds[1:]),
        "redis_cpu_ms": statistics.median(cpu_ms[1:]),
        "redis_commands": statistics.median(calls[1:]),
        "seconds": seconds,
    }


def spent(admin: Any) -> tuple[float, int]:
    """CPU seconds of the server, and the commands that it has had."""
    cpu = admin.info("cpu")
    return cpu["used_cpu_user"] + cpu["used_cpu_sys"], admin.info("stats")["total_commands_processed"]


async def serve(url: str, pool: str, count: int) -> None:
    """The workers, until the input ends."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(sys.stdin, ended.set)
    loop.set_default_executor(ThreadPoolExecutor(2 * count + 8))  # each worker's transfer waits in a thread
    config = WorkerConfig(redis_url=url, pool=pool, lease_s=60.0)
    workers = [Worker(config, ScriptedEngine(), NoTokenizer()) for _ in range(count)]
    serving = [asyncio.create_task(worker.run()) for worker in workers]
    await asyncio.gather(*(worker.joined.wait() for worker in workers))
    print("up", flush=True)
    await asyncio.wait({asyncio.create_task(ended.wait()), *serving}, return_when=asyncio.FIRST_COMPLETED)


if __name__ == "__main__":
    if sys.argv[1] == "workers":
        asyncio.run(serve(sys.argv[2], sys.argv[3], int(sys.argv[4])))
    else:
        with EmbeddedRedis() as server:
            host, found = describe_host(server.url, []), list[dict[str, Any]]()
            for size in sys.argv[2].split(","):
                found.append(measure(server.url, int(size)))
                print(json.dumps(found[-1]), flush=True)
        figures = {"fanout": found, "torch": torch.__version__, "host": host}
        Path(sys.argv[1]).write_text(json.dumps(figures, indent=2) + "\n")
