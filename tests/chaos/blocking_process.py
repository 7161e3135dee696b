"""A plain loop with the blocking client that a user interrupts all the time: Ctrl-C, and it asks again.

    python -m chaos.blocking_process REDIS_URL CLIENT_ID JOBS_FILE JOURNAL_DIR RUN

A third of the jobs is waited for one by one, another is taken from `results`, another from `groups`. SIGINT raises
KeyboardInterrupt inside these calls only. On stdout a line of JSON each: {"submitted": jobs}, and at the end
{"finished": outcomes, "interrupted": times}. {"trouble": error}: a job's outcome is nowhere.
"""

from __future__ import annotations

import ctypes
import json
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from . import sabotage
from .worker_process import PR_SET_PDEATHSIG, tell


class Interrupted:
    """Calls that Ctrl-C may interrupt. count: how often it did."""

    def __init__(self) -> None:
        self.count = 0
        self._inside = False
        signal.signal(signal.SIGINT, self._raise)

    def _raise(self, *_: object) -> None:
        if self._inside:
            self._inside = False  # one for each call
            self.count += 1
            raise KeyboardInterrupt

    def call(self, function: Callable[[], Any]) -> Any:
        """The value of the call, which is made again after each Ctrl-C."""
        while True:
            try:
                self._inside = True
                value = function()
                self._inside = False  # with no call in between, at which CPython would look for signals
            except KeyboardInterrupt:
                continue
            return value

    def each(self, iterate: Callable[[], Iterable[Any]]) -> Iterator[Any]:
        """The items of an iteration, which is begun again after each Ctrl-C."""
        items = iter(iterate())
        while True:
            try:
                self._inside = True
                for item in items:  # noqa: B007 – yielded below
                    # and not `next`, which is such a call
                    self._inside = False
                    break
                else:
                    return
            except KeyboardInterrupt:
                items = iter(iterate())
                continue
            finally:
                self._inside = False
            yield item


def work(url: str, client_id: str, lines: list[str], journal_dir: Path, run: str) -> None:
    from rolloutmq import BlockingRolloutClient, GenerateJob  # noqa: PLC0415
    from rolloutmq.messages.errors import RolloutMQError  # noqa: PLC0415

    from .context import POOL  # noqa: PLC0415
    from .journal import Journal  # noqa: PLC0415

    book, interrupted = Journal(journal_dir, run), Interrupted()
    jobs = [GenerateJob(**json.loads(line)) for line in lines]
    third = len(jobs) // 3
    taken = 0
    with BlockingRolloutClient(url, POOL, client_id=client_id) as client:

        def submit(part: list[GenerateJob]) -> list[Any]:
            handles = client.submit_many(part)
            for job in part:
                book.submitted(job, client_id)
            tell(submitted=len(part))
            return handles

        def received(outcomes: Iterable[Any]) -> None:
            nonlocal taken
            for outcome in outcomes:
                book.received(outcome, client_id)
                taken += 1

        for handle in submit(jobs[:third]):
            try:
                received(interrupted.call(lambda handle=handle: client.wait(handle, 30)))
            except RolloutMQError as error:
                tell(trouble=str(error))
        submit(jobs[third : 2 * third])
        received(interrupted.each(lambda: client.results(30)))
        submit(jobs[2 * third :])
        for group in interrupted.each(lambda: client.groups(30)):
            received((*group.results, *group.failures))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interpreter that ends dies of it
    tell(finished=taken, interrupted=interrupted.count)


def main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    url, client_id, jobs_file, journal_dir, run = sys.argv[1:]
    sabotage.adopt()
    work(url, client_id, Path(jobs_file).read_text().splitlines(), Path(journal_dir), run)


if __name__ == "__main__":
    main()
