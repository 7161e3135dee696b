"""arq: one coroutine per outstanding job enqueues it and polls for its result, over a pool of connections.

The worker runs up to 1,000 jobs at a time and polls every 5 ms (its defaults, 10 and 500 ms, are for long jobs).
"""

from __future__ import annotations

import asyncio
from typing import Any

from arq import create_pool, func
from arq.connections import RedisSettings
from arq.worker import Worker

from .load import Load, Tally, drive_lanes, echo, main


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


async def _drive(url: str, load: Load) -> dict[str, float]:
    redis = await create_pool(RedisSettings.from_dsn(url))

    async def answer(tally: Tally, number: int, payload: bytes) -> None:
        job = await redis.enqueue_job("echo", payload)
        if job is None:
            raise SystemExit("arq refused a job")
        tally.sent(job.job_id, number)
        tally.answered(job.job_id, await job.result(timeout=60, poll_delay=load.poll_s))

    return await drive_lanes(load, answer)


def drive(url: str, load: Load) -> dict[str, float]:
    return asyncio.run(_drive(url, load))


if __name__ == "__main__":
    main(work, drive)
