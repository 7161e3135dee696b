"""taskiq with taskiq-redis: a coroutine per outstanding job kicks it and waits for its result, over pooled connections.

variant "list": ListQueueBroker; "stream": RedisStreamBroker, which acknowledges. One worker process, 1,000 tasks at a
time. Messages and results are serialised with orjson, the fastest serialiser it comes with for them.
"""

from __future__ import annotations

import asyncio
import os
import sys

from taskiq import AsyncBroker
from taskiq.serializers import ORJSONSerializer
from taskiq_redis import ListQueueBroker, RedisAsyncResultBackend, RedisStreamBroker

from .load import Load, Tally, drive_lanes, echo, main


def make_broker(url: str, variant: str) -> AsyncBroker:
    serializer = ORJSONSerializer()
    results: RedisAsyncResultBackend[str] = RedisAsyncResultBackend(url, result_ex_time=60, serializer=serializer)
    kind = RedisStreamBroker if variant == "stream" else ListQueueBroker
    return kind(url).with_result_backend(results).with_serializer(serializer)


broker = make_broker(os.environ.get("BENCH_URL", "redis://localhost"), os.environ.get("BENCH_VARIANT", ""))


@broker.task(task_name="echo")  # type: ignore[untyped-decorator]  # taskiq is in an environment of its own
async def echo_task(payload: str) -> str:
    # taskiq's messages are JSON. The payload's bytes are ASCII and travel as text.
    return echo(payload.encode()).decode()


def work(_url: str, _load: Load) -> None:
    """Become `taskiq worker`: it serves until SIGTERM."""
    options = ["--workers", "1", "--max-async-tasks", "1000", "--log-level", "WARNING", "--no-parse"]
    os.execv(sys.executable, [sys.executable, "-m", "taskiq", "worker", "peers.taskiq_peer:broker", *options])


async def answer(tally: Tally, number: int, payload: bytes) -> None:
    task = await echo_task.kiq(payload.decode())
    tally.sent(task.task_id, number)
    result = await task.wait_result(check_interval=tally.load.poll_s, timeout=60)
    tally.answered(task.task_id, result.return_value.encode())


async def _drive(load: Load) -> dict[str, float]:
    await broker.startup()
    figures = await drive_lanes(load, answer)
    await broker.shutdown()
    return figures


def drive(_url: str, load: Load) -> dict[str, float]:
    return asyncio.run(_drive(load))


if __name__ == "__main__":
    main(work, drive)
