"""A worker with the scripted engine, to be started as a process: what `rolloutmq worker` is without a model.

    python -m support.pools.scripted_worker '{"tokens_per_s": 100, "max_running": 4, …}'

The pool's Redis is $ROLLOUTMQ_REDIS. SIGTERM drains it, whoever sends it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[2]


def command(**options: Any) -> list[str]:
    """The command line of such a worker. options: fields of WorkerConfig, and tokens_per_s."""
    return [sys.executable, "-m", "support.pools.scripted_worker", json.dumps(options)]


def environment(url: str) -> dict[str, str]:
    """What it needs, beside the environment of who starts it."""
    path = [str(TESTS), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {"ROLLOUTMQ_REDIS": url, "PYTHONPATH": os.pathsep.join(path)}


async def serve(options: dict[str, Any]) -> None:
    from rolloutmq.worker.config import WorkerConfig  # noqa: PLC0415
    from rolloutmq.worker.scripted.engine import ScriptedEngine  # noqa: PLC0415
    from rolloutmq.worker.text.tokenizer import NoTokenizer  # noqa: PLC0415
    from rolloutmq.worker.worker import Worker  # noqa: PLC0415

    engine = ScriptedEngine(tokens_per_s=options.pop("tokens_per_s", None))
    config = WorkerConfig(redis_url=os.environ["ROLLOUTMQ_REDIS"], **options)
    worker = Worker(config, engine, NoTokenizer())
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, worker.drain)
    await worker.run()
    print("generated", worker.vitals.generation.generated_tokens, flush=True)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    asyncio.run(serve(json.loads(sys.argv[1])))
