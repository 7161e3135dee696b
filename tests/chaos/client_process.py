"""A trainer's client as a process: submits the jobs in a file, takes all outcomes, writes its journal.

    python -m chaos.client_process REDIS_URL CLIENT_ID JOBS_FILE JOURNAL_DIR RUN '{"clock_s": 3600, …}'

On stdout a line of JSON each: {"submitted": jobs}, {"taken": outcomes so far}, {"finished": outcomes}, and
{"told": error} if the client raises one; the exit code is 3 then.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import signal
import sys
from pathlib import Path

from . import habits
from .worker_process import PR_SET_PDEATHSIG, tell


async def work(url: str, client_id: str, lines: list[str], journal_dir: Path, run: str) -> None:
    from rolloutmq import GenerateJob, RolloutClient  # noqa: PLC0415

    from .context import POOL, Trainer  # noqa: PLC0415
    from .journal import Journal  # noqa: PLC0415

    jobs = [GenerateJob(**json.loads(line)) for line in lines]
    async with RolloutClient(url, POOL, client_id=client_id) as client:
        trainer = Trainer(client, Journal(journal_dir, run))
        await trainer.submit(jobs)
        tell(submitted=len(jobs))
        taken = 0
        while found := await trainer.take(1):
            taken += len(found)
            tell(taken=taken)
    tell(finished=taken)


def main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    url, client_id, jobs_file, journal_dir, run, options = sys.argv[1:]
    habits.adopt(habits.Options(**json.loads(options)), tell)
    from rolloutmq.messages.errors import RolloutMQError, WaitTimeout  # noqa: PLC0415

    try:
        asyncio.run(work(url, client_id, Path(jobs_file).read_text().splitlines(), Path(journal_dir), run))
    except WaitTimeout:
        raise
    except RolloutMQError as error:
        tell(told=f"{type(error).__name__}: {error}")
        sys.exit(3)


if __name__ == "__main__":
    main()
