"""Workers with real leases hold jobs. Half of them fall silent at once: when can each of their jobs be claimed again?

    python -m benchmarks.deaths --out benchmarks/results/deaths-cpu.json

The leases are renewed, and dead workers looked for, by the worker's own loop, all in one process. Jobs are held and
not run. Measured is the time until the queue has every job of the dead, by this process' clock and by the pool's. The
slowest command in that time is the slow log's, so on a busy host it has the time of others in it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

from rolloutmq.messages.broker import Broker, Lease
from rolloutmq.messages.model import WorkerStatus
from rolloutmq.messages.redis import connect
from rolloutmq.messages.scripts.source import script_source
from rolloutmq.ops.redis import EmbeddedRedis
from rolloutmq.worker.lease import Membership

from .broker.environments import describe_host
from .worst_calls import POOL, Pool

LEASE_S = 10.0
EACH = 64


def status(lease: Lease) -> WorkerStatus:
    return WorkerStatus(worker_id=lease.worker_id, host="h", pid=1, state="serving", version=0)


async def hear(_: object) -> None:
    """Of a heartbeat's answer nothing is needed."""


async def die(url: str, workers: int) -> dict[str, Any]:
    pool = Pool(url, 1)
    async with connect(url) as redis:
        client: Any = redis
        leases = [Lease(redis, POOL, f"w{number:04d}", LEASE_S) for number in range(workers)]
        loops: list[asyncio.Task[None]] = []
        began = time.monotonic()
        for lease in leases:
            membership = Membership(lease, 1.0, 3)
            await membership.join(status(lease))
            loops.append(asyncio.create_task(membership.run(partial(status, lease), hear)))
        joined_s = time.monotonic() - began
        pool.submit(pool.rows(workers * EACH, "client"))
        for lease in leases:
            if len(await lease.claim(EACH, EACH, 0)) != EACH:
                raise SystemExit(f"{lease.worker_id} did not get its jobs")
        await asyncio.sleep(2 * LEASE_S)  # as many heartbeats as usual by now
        pool.redis.slowlog_reset()
        began, clock = time.monotonic(), int(await client.hget(pool.keys.clock, "at"))
        died = loops[: workers // 2]
        for task in died:
            task.cancel()
        while sum((await Broker(redis, POOL).load()).queued) < len(died) * EACH:  # noqa: ASYNC110 – nobody rings
            await asyncio.sleep(0.02)
        recovered_s, now = time.monotonic() - began, int(await client.hget(pool.keys.clock, "at"))
        commands = pool.redis.slowlog_get(1 << 16)
        alive = sum(not task.done() for task in loops)
        for task in loops:
            task.cancel()
    slowest = max(commands, key=lambda command: command["duration"])
    words = slowest["command"].split()
    scripts = {pool.redis.script_load(script_source(name)).encode(): name for name in ("heartbeat", "reap")}
    return {
        "workers": workers,
        "joined_s": round(joined_s, 2),
        "died": len(died),
        "alive": alive,
        "jobs_lost": len(died) * EACH,
        "lease_s": LEASE_S,
        "recovered_s": round(recovered_s, 2),
        "recovered_by_the_pools_clock_s": round((now - clock) / 1e3, 2),
        "commands": len(commands),
        "slowest": scripts.get(words[1], words[0].decode()) if words[0] == b"EVALSHA" else words[0].decode(),
        "slowest_ms": slowest["duration"] / 1e3,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=500)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with EmbeddedRedis() as server:
        found = {"host": describe_host(server.url, [])} | asyncio.run(die(server.url, options.workers))
    said = json.dumps(found, indent=1)
    if options.out:
        options.out.write_text(said + "\n")
    print(said)


if __name__ == "__main__":
    main()
