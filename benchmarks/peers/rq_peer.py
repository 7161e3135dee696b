"""RQ: jobs go in with `enqueue_many`, results are waited for where the worker puts them (`latest_result(timeout=…)`).

variant "simple": SimpleWorker, which runs jobs in its own process; "fork": the default Worker, a process per job.
"""

from __future__ import annotations

from collections import deque
from itertools import islice

from redis import Redis
from rq import Queue, SimpleWorker, Worker
from rq.job import Job

from .load import Load, Tally, echo, main

QUEUE = "bench"


def work(url: str, load: Load) -> None:
    """Serve until SIGTERM."""
    kind = Worker if load.variant == "fork" else SimpleWorker
    worker = kind([Queue(QUEUE, connection=Redis.from_url(url))], connection=Redis.from_url(url))
    worker.work(logging_level="WARNING")


def phase(queue: Queue, tally: Tally, seconds: float) -> dict[str, float]:
    """Keep the window between half and full. Take results in the order in which one worker finishes them."""
    load = tally.load
    source = tally.payloads(seconds)
    outstanding: deque[Job] = deque()
    while True:
        if len(outstanding) <= load.window // 2:
            batch = list(islice(source, load.window - len(outstanding)))
            if not batch and not outstanding:
                return tally.figures()
            if batch:
                # With a given description RQ need not build one from the arguments.
                datas = [Queue.prepare_data(echo, (payload,), description="echo") for _, payload in batch]
                jobs = queue.enqueue_many(datas)
                for job, (number, _) in zip(jobs, batch, strict=True):
                    tally.sent(job.id, number)
                outstanding.extend(jobs)
        job = outstanding.popleft()
        result = job.latest_result(timeout=60)
        tally.answered(job.id, result.return_value if result else None)


def drive(url: str, load: Load) -> dict[str, float]:
    tally, queue = Tally(load), Queue(QUEUE, connection=Redis.from_url(url))
    phase(queue, tally, load.warmup_s)
    return phase(queue, tally, load.seconds)


if __name__ == "__main__":
    main(work, drive)
