"""A worker as a process, with the scripted engine and, if asked, a bad habit.

    python -m chaos.worker_process REDIS_URL '{"lease_s": 1.0, …}'

On stdout a line of JSON each: {"joined": id}, {"fenced": publishes refused}, {"generated": tokens} at the end.
Ends with its parent.
"""

from __future__ import annotations

import asyncio
import ctypes
import dataclasses
import json
import logging
import os
import signal
import sys
import time
from typing import Any

# Before anything of the package is imported: what it imports by name must already be different.
from . import habits

PR_SET_PDEATHSIG = 1


def tell(**news: Any) -> None:
    print(json.dumps(news), flush=True)


async def serve(url: str, options: habits.Options) -> None:
    from rolloutmq.worker.config import WorkerConfig  # noqa: PLC0415
    from rolloutmq.worker.worker import Worker  # noqa: PLC0415

    engine = habits.engine(options, tell)
    worker = Worker(WorkerConfig(redis_url=url, **options.config), engine, habits.EightTokens())
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, worker.drain)
    telling = asyncio.create_task(_tell_incarnations(worker))
    try:
        await worker.run()
    finally:
        telling.cancel()
    tell(generated=worker.vitals.generation.generated_tokens)


async def _tell_incarnations(worker: Any) -> None:
    """The id changes with every lease; `joined` is set once it holds the first one."""
    await worker.joined.wait()
    told = ""
    while True:
        if worker.worker_id != told:
            told = worker.worker_id
            tell(joined=told)
        await asyncio.sleep(0.02)


def main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    options = habits.Options(**json.loads(sys.argv[2]))
    logging.basicConfig(level=logging.INFO, format=f"{os.getpid()} %(relativeCreated)d %(message)s", stream=sys.stderr)
    habits.adopt(options, tell)
    tell(options=dataclasses.asdict(options), clock=time.time())
    asyncio.run(serve(sys.argv[1], options))


if __name__ == "__main__":
    main()
