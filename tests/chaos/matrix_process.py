"""A trainer that asks for all kinds of things at once until SIGTERM, or until it is killed.

    python -m chaos.matrix_process REDIS_URL NAME SEED JOURNAL_DIR RUN [ADAPTER…]

It has a client for each way of taking outcomes: NAME.results, NAME.groups, NAME.waits, NAME.batches. Each begins with
what an earlier run has left, and ends when nothing is outstanding. On stdout a line of JSON each: {"begun": run},
{"taken": 100} for each hundred outcomes, {"trouble": error} for whatever should not have happened, and at the end
{"finished": outcomes}.
"""

from __future__ import annotations

import asyncio
import ctypes
import signal
import sys
import traceback
from pathlib import Path

from . import sabotage
from .worker_process import PR_SET_PDEATHSIG, tell


async def work(url: str, name: str, seed: str, journal_dir: Path, run: str, *adapters: str) -> None:
    from rolloutmq import RolloutClient  # noqa: PLC0415

    from .context import POOL  # noqa: PLC0415
    from .journal import Journal  # noqa: PLC0415
    from .rounds import ROUNDS  # noqa: PLC0415
    from .taker import Taker, again  # noqa: PLC0415

    book = Journal(journal_dir, run)
    takers: list[Taker] = []

    async def one(way: str) -> None:
        client = RolloutClient(url, POOL, client_id=f"{name}.{way}")
        await again(client.open)
        taker = Taker(client, book, f"{seed}:{run}:{way}", adapters)
        takers.append(taker)
        await taker.take_all()  # of an earlier run
        await asyncio.gather(*(taker.go(rounds) for rounds in ROUNDS[way]))
        await taker.take_all()
        if client.outstanding:
            tell(trouble=f"{client.client_id}: {client.outstanding} jobs are outstanding for ever")
        await again(client.aclose)

    def stop() -> None:
        for taker in takers:
            taker.stopping.set()

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop)
    tell(begun=run)
    try:
        async with asyncio.TaskGroup() as ways:
            for way in ROUNDS:
                ways.create_task(one(way))
    except BaseExceptionGroup as group:
        for error in group.exceptions:
            tell(trouble=f"{type(error).__name__}: {error}")
            traceback.print_exception(error)
        sys.exit(3)
    tell(finished=sum(taker.taken for taker in takers))


def main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    url, name, seed, journal_dir, run, *adapters = sys.argv[1:]
    sabotage.adopt()
    asyncio.run(work(url, name, seed, Path(journal_dir), run, *adapters))


if __name__ == "__main__":
    main()
