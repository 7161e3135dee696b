"""The queue of a pool's operations in RQ (submit, look, list), and the worker that runs them.

RQ's keys begin with `rq:` and know no hash tags. The queue's name contains the pool's, so pools stay apart.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from typing import Any

from pydantic_core import to_jsonable_python
from redis import Redis
from redis.backoff import ExponentialBackoff
from redis.client import Pipeline
from redis.exceptions import ConnectionError, TimeoutError
from redis.retry import Retry as RedisRetry
from rq import Queue, Retry, Worker
from rq.exceptions import DuplicateJobError, NoSuchJobError
from rq.job import Job, JobStatus
from rq.registry import FailedJobRegistry, FinishedJobRegistry, StartedJobRegistry
from rq.worker_registration import get_keys

from ...messages.errors import ConfigError, InvalidField
from ...messages.redis import Keys, parse_one, redacted, told_as_ours
from .catalog import checked
from .rq_job import CANCELLED, ENTRY, ForeignJob, MsgpackSerializer, OperationJob

PR_SET_PDEATHSIG = 1
RESULT_TTL_S, FAILURE_TTL_S = 86400, 7 * 86400
REPLY_TIMEOUT_S = 5.0
RETRIES = 3
"""An operation starts again so often after its worker died, or after an error that is no RolloutMQError."""


def queue_name(pool: str) -> str:
    """The RQ queue of a pool's operations. Raises InvalidField for a name that no pool can have."""
    return f"rmq-ops:{Keys(pool).pool}"


@dataclass(frozen=True, slots=True)
class OperationRun:
    """One submitted operation. state: queued, started, finished, failed, cancelled, or another of RQ's.

    total: None: not known.
    """

    id: str
    operation: str
    params: dict[str, Any]
    state: str
    submitted_at: float
    done: int = 0
    total: int | None = None
    message: str = ""
    result: dict[str, Any] | None = None
    error: str = ""

    @property
    def over(self) -> bool:
        return self.state in {"finished", "failed", "cancelled"}


class _Retry(RedisRetry):
    """Tries again after broken connections, but not when a server has not answered for REPLY_TIMEOUT_S."""

    def __init__(self) -> None:
        super().__init__(ExponentialBackoff(cap=1.0, base=0.1), 3, (ConnectionError,))

    def call_with_retry(self, *args: Any, **options: Any) -> Any:
        try:
            return super().call_with_retry(*args, **options)
        except TimeoutError as error:
            raise TimeoutError(f"no reply within {REPLY_TIMEOUT_S:g} s") from error


class OperationQueue:
    """One pool's operations. Use as a context manager: errors in its block that say that Redis is absent, or does not
    answer, become RedisUnavailable."""

    def __init__(self, redis_url: str, pool: str, *, patient: bool = False) -> None:
        """It does not connect yet. Raises ConfigError, InvalidField.

        patient: ask a server that does not answer for as long as redis-py does: a minute and more.
        """
        self.name = queue_name(pool)
        self._told = told_as_ours(redacted(redis_url))
        self.redis = _connect(redis_url, **({} if patient else {"retry": _Retry()}))
        serializer: Any = MsgpackSerializer
        self.rq = Queue(self.name, connection=self.redis, job_class=OperationJob, serializer=serializer)

    def __enter__(self) -> OperationQueue:
        self._told.__enter__()
        return self

    def __exit__(self, *error: Any) -> bool | None:
        self.redis.close()
        return self._told.__exit__(*error)

    def submit(self, name: str, params: dict[str, Any], once_per_s: float | None = None) -> str:
        """Queue an operation; returns its id. Raises InvalidField for a name or a parameter that is not allowed.

        once_per_s: 60 to 86400. Time, as Unix seconds, is cut into slots of so many seconds. If the same was submitted
        in this slot already, by anybody, nothing is queued, and the id is that one's.
        """
        chosen, settings = checked(name, params)
        given = to_jsonable_python(settings.model_dump(exclude_unset=True))
        run_id = None if once_per_s is None else self._slot_id([name, given], once_per_s)
        with contextlib.suppress(DuplicateJobError):  # RQ looks, saves and queues in one script
            run_id = self.rq.enqueue_call(
                ENTRY,
                args=(name, given),
                timeout=chosen.timeout_s,
                result_ttl=RESULT_TTL_S,
                failure_ttl=FAILURE_TTL_S,
                retry=Retry(max=RETRIES),
                description=name,
                job_id=run_id,
                unique=run_id is not None,
            ).id
        return str(run_id)

    def _slot_id(self, what: list[Any], once_per_s: float) -> str:
        """The id of a run in the slot that is now."""
        if not 60 <= once_per_s <= RESULT_TTL_S:  # a record has to outlive its slot
            raise InvalidField("once_per", once_per_s, f"60 to {RESULT_TTL_S} seconds")
        slot = [self.name, *what, once_per_s, time.time() // once_per_s]
        return hashlib.sha256(json.dumps(slot, sort_keys=True).encode()).hexdigest()[:32]

    def run(self, run_id: str) -> OperationRun:
        """The state of an operation. Raises InvalidField if this id has none, or none any more."""
        try:
            job = OperationJob.fetch(run_id, connection=self.redis, serializer=MsgpackSerializer)
        except (NoSuchJobError, ValueError):
            raise InvalidField("id", run_id, "the id of an operation of the last day (ops list shows them)") from None
        if job.origin != self.name:
            raise InvalidField("id", run_id, f"an operation in the queue {self.name}, not in {job.origin}")
        return _seen(job)

    def cancel(self, run_id: str) -> OperationRun:
        """Cancel an operation. Returns its state from before.

        One that is queued will not be run. One that is under way ends within a second or so, with what it cleans up; if
        its worker died, it ends when the next worker takes it up. One that is over stays as it is. Raises InvalidField.
        """

        seen: list[OperationRun] = []

        def mark(pipe: Pipeline) -> None:
            run = self.run(run_id)  # read while its record is watched
            seen.append(run)
            pipe.multi()
            if run.over:
                return
            pipe.hset(OperationJob.key_for(run_id), CANCELLED, 1)
            if run.state != "started":
                job = OperationJob.fetch(run_id, connection=self.redis, serializer=MsgpackSerializer)
                pipe.lrem(self.rq.key, 0, run_id)
                job.set_status(JobStatus.FAILED, pipeline=pipe)
                self.rq.failed_job_registry.add(job, FAILURE_TTL_S, pipeline=pipe)

        self.redis.transaction(mark, OperationJob.key_for(run_id))
        return seen[-1]

    def runs(self, most: int = 100) -> list[OperationRun]:
        """Queued, running, finished, failed and cancelled operations, newest first, at most `most` of each."""
        ids = [*self.rq.get_job_ids(0, most)]
        for kind in (StartedJobRegistry, FinishedJobRegistry, FailedJobRegistry):
            registry = kind(queue=self.rq)
            ids += registry.get_job_ids(0, most - 1, desc=True, cleanup=False)
        found: list[OperationRun] = []
        for job_id in dict.fromkeys(ids):
            try:
                found.append(self.run(job_id))
            except InvalidField:
                continue
        return sorted(found, key=lambda run: run.submitted_at, reverse=True)

    def has_worker(self) -> bool:
        """Whether a worker listens, as far as RQ knows: one that was killed is listed for up to two minutes."""
        return any(self.redis.exists(key) for key in get_keys(queue=self.rq))


def _connect(redis_url: str, **settings: Any) -> Redis:
    """A blocking client for RQ, which needs a single server. It does not connect yet.

    A server that does not answer is an error after REPLY_TIMEOUT_S. RQ gives its worker's waits for a job more time.
    """
    target = parse_one(redis_url, "RQ, which runs operations,")
    if target.kind != "single":
        raise ConfigError(
            f"{redacted(redis_url)}: RQ, which runs operations, needs a plain redis://, rediss:// or unix:// URL; "
            "name one with --ops-redis. The pool's own may be of any kind"
        )
    options = dict(target.options)
    if not target.nodes:
        options["unix_socket_path"] = options.pop("path")
    return Redis(
        ssl=target.tls,
        protocol=2,
        socket_timeout=REPLY_TIMEOUT_S,
        socket_connect_timeout=REPLY_TIMEOUT_S,
        health_check_interval=15,
        **settings,
        **options,
    )


def _seen(job: OperationJob) -> OperationRun:
    meta = job.meta if isinstance(job.meta, dict) else {}
    progress = meta.get("progress") or {}
    try:
        name, params = job.call()
    except ForeignJob:
        name, params = "(no operation)", {}
    state = str(job.get_status(refresh=False).value)
    if state == "failed" and job.cancelled:
        state = "cancelled"
    last = job.latest_result() if state in {"finished", "failed"} else None
    error = ""
    if state == "failed":
        text = (last.exc_string if last else "") or ""
        error = meta.get("error") or (text.strip().splitlines() or ["it left no word"])[-1]
    return OperationRun(
        id=str(job.id),
        operation=str(name),
        params=params if isinstance(params, dict) else {},
        state=state,
        submitted_at=job.enqueued_at.timestamp() if job.enqueued_at else 0.0,
        done=progress.get("done", 0),
        total=progress.get("total"),
        message=progress.get("message", ""),
        result=last.return_value if last and state == "finished" else None,
        error=error,
    )


class OperationWorker(Worker):
    """RQ's forking worker, narrowed to operations. It runs the operations of one pool, one at a time.

    It forks, because the parent goes on renewing its claim while an operation runs: an operation whose worker was
    killed is found within two minutes rather than after its time limit. Memory and crashes stay in the child. RQ's
    SpawnWorker would put the password of Redis into its child's command line.
    """

    job_class = OperationJob

    def __init__(self, connection: Redis, redis_url: str, pool: str, **options: Any) -> None:
        """connection: to the Redis that holds RQ's keys. redis_url, pool: what the operations work on."""
        self._serves = redis_url, pool
        super().__init__(
            [queue_name(pool)],
            connection=connection,
            job_class=OperationJob,
            serializer=MsgpackSerializer,
            # Between two waits for a job a worker takes back what dead ones left; RQ's own pace is ten minutes.
            worker_ttl=45,
            maintenance_interval=30,
            job_monitoring_interval=15,
            **options,
        )
        # RQ gives new connections the time that it waits for a job, and those that there are keep theirs.
        connection.connection_pool.disconnect()
        connection.connection_pool.reset()

    def perform_job(self, job: Job, queue: Queue) -> bool:
        """Like RQ's; the job gets the worker's Redis and pool first."""
        assert isinstance(job, OperationJob)
        job.serves = self._serves
        return bool(super().perform_job(job, queue))

    def subscribe(self) -> None:
        """Not to RQ's messages: whoever can publish could end the worker with them."""

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
