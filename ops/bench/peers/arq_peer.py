"""arq: one coroutine per outstanding job enqueues it and polls for its result, over a pool of connections.

The worker runs up to 1,000 jobs at a time and polls every 5 ms (its defaults, 10 and 500 ms, are for long jobs).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

from arq import create_pool, func
from arq.connections import ArqRedis, RedisSettings
from arq.worker import Worker

from .echo import echo
from .load import Load, Tally, main


async def echo_job(_context: dict[Any, Any], payload: bytes) -> bytes:
    return echo(payload)


def work(url: str, _load: Load) -> None:
    """Serve until SIGTERM."""
    asyncio.set_event_loop(asyncio.new_event_loop())
    Worker(
        functions=[func(echo_job, name="echo")],
        redis_settings=RedisSettings.from_dsn(url),
        max_jobs=1000,
        poll_delay=0.005,
        keep_result=60,
        log_results=False,
    ).run()


async def lane(redis: ArqRedis, tally: Tally, source: Iterator[tuple[int, bytes]]) -> None:
    for number, payload in source:
        job = await redis.enqueue_job("echo", payload)
        if job is None:
            raise SystemExit("arq refused a job")
        tally.sent(job.job_id, number)
        tally.answered(job.job_id, await job.result(timeout=60, poll_delay=tally.load.poll_s))


async def phase(redis: ArqRedis, tally: Tally, seconds: float) -> dict[str, float]:
    source = tally.payloads(seconds)
    await asyncio.gather(*(lane(redis, tally, source) for _ in range(tally.load.window)))
    return tally.figures()


async def _drive(url: str, load: Load) -> dict[str, float]:
    tally = Tally(load)
    redis = await create_pool(RedisSettings.from_dsn(url))
    await phase(redis, tally, load.warmup_s)
    return await phase(redis, tally, load.seconds)


def drive(url: str, load: Load) -> dict[str, float]:
    return asyncio.run(_drive(url, load))


if __name__ == "__main__":
    main(work, drive)
