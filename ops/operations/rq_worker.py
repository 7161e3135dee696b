"""The worker of `rolloutmq ops worker`: RQ's forking worker, narrowed to operations.

Forking, not SimpleWorker: while an operation runs the parent goes on renewing its claim, so that one whose worker was
killed is found within two minutes rather than after its time limit; memory and crashes stay in the child; a running
operation can be stopped. Not SpawnWorker, which puts the password of Redis into its child's command line. An operation
is never so short that the fork's few milliseconds matter.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Any

from redis import Redis
from rq import Queue, Worker
from rq.job import Job

from .rq_job import MsgpackSerializer, OperationJob, Surroundings
from .rq_queue import queue_name

PR_SET_PDEATHSIG = 1


class OperationWorker(Worker):
    """Runs the operations of one pool, one at a time."""

    job_class = OperationJob

    def __init__(self, connection: Redis, surroundings: Surroundings, **options: Any) -> None:
        """connection: to the Redis that holds RQ's keys."""
        self._surroundings = surroundings
        super().__init__(
            [queue_name(surroundings.pool)],
            connection=connection,
            job_class=OperationJob,
            serializer=MsgpackSerializer,
            # Between two waits for a job a worker takes back what dead ones left; RQ's own pace is ten minutes.
            worker_ttl=45,
            maintenance_interval=30,
            job_monitoring_interval=15,
            **options,
        )

    def perform_job(self, job: Job, queue: Queue) -> bool:
        """As RQ's, for a job that now knows where it works."""
        assert isinstance(job, OperationJob)
        job.surroundings = self._surroundings
        return bool(super().perform_job(job, queue))

    def run_maintenance_tasks(self) -> None:
        """Take back what dead workers left. RQ's groups are not used, and theirs would be read with pickle."""
        self.clean_registries()  # type: ignore[no-untyped-call]

    def fork_work_horse(self, job: Job, queue: Queue) -> None:
        self._parent = os.getpid()
        super().fork_work_horse(job, queue)

    def setup_work_horse_signals(self) -> None:
        """A SIGKILLed worker leaves its child running in RQ; here it takes it along (on Linux)."""
        super().setup_work_horse_signals()  # type: ignore[no-untyped-call]
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != self._parent:  # it died between the fork and this
                os._exit(1)
