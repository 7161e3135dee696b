"""A worker as a process: signals in, exit code out."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from typing import NoReturn

from .commands import beside
from .config import WorkerConfig
from .garbage import settle
from .sglang import SGLangConfig
from .text import ModelTokenizer
from .worker import Worker

log = logging.getLogger(__name__)


def run_worker(config: WorkerConfig, engine: SGLangConfig) -> None:
    """Serve until SIGTERM or SIGINT, then drain. A second SIGINT ends it at once. Raises what Worker.run raises."""
    asyncio.run(_run(config, engine))


def exit_at_once() -> NoReturn:
    """End this process. Its worker must have left, and its engine must be closed.

    Python's own way out takes seconds under torch and SGLang, and a pod's grace period may not have them.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


async def settled_once_up(worker: Worker) -> None:
    """For a process that does nothing but serve: see :mod:`.garbage`."""
    await worker.joined.wait()
    settle()


async def _run(config: WorkerConfig, engine: SGLangConfig) -> None:
    from .sglang.engine import SGLangEngine  # noqa: PLC0415 – seconds of imports, after the settings were checked

    worker = Worker(config, SGLangEngine(engine), ModelTokenizer(engine.model))
    loop = asyncio.get_running_loop()

    def stop(number: int) -> None:
        log.info("%s: draining, %g s at most", signal.Signals(number).name, config.drain_s)
        worker.drain()
        loop.remove_signal_handler(signal.SIGINT)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number)
    async with beside(settled_once_up(worker)):
        await worker.run()
