"""An operation as an RQ job, without the parts of RQ's jobs that could run foreign code.

Everybody who can write to Redis can write a job. RQ would unpickle it, import its function and its callbacks, and call
its webhooks. Here a job is a msgpack list, and only the fields below are read from its record. The name of its function
is compared and never imported. So a job can only run a registered operation, whose parameters are checked again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import zlib
from collections.abc import Coroutine
from typing import Any

import msgpack
from redis import Redis
from redis.client import Pipeline
from redis.exceptions import RedisError
from rq import Queue
from rq.exceptions import DeserializationError, NoSuchJobError
from rq.job import Job

from ...messages.errors import ConfigError, RolloutMQError
from .run import run_operation

ENTRY = "rolloutmq.operation"
"""RQ keeps a function's name in this place. There is no such function."""
UNREADABLE = "(unreadable)"
MAX_BYTES = 1 << 20
"""Longest call, result or progress of a job."""
CANCELLED = "cancelled"
"""The field of a job's record that an operator's `ops cancel` sets. Nothing but the record's end removes it."""
LOOK_S = 0.5
"""Between two looks of a running operation at that field."""

_READ = frozenset(
    [
        *("data", "meta", "status", "description", "origin", "worker_name", "timeout"),
        *("created_at", "enqueued_at", "started_at", "ended_at", "last_heartbeat"),
        *("ttl", "result_ttl", "failure_ttl", "retries_left", "number_of_retries"),
    ]
)
_log = logging.getLogger(__name__)


class ForeignJob(RolloutMQError):
    """A job in the operations queue that is no operation. It was not run."""


class MsgpackSerializer:
    """Plain data and nothing else. RQ wants a class with these two methods."""

    @staticmethod
    def dumps(obj: Any) -> bytes:
        packed: bytes = msgpack.packb(obj, use_bin_type=True)
        if len(packed) > MAX_BYTES:
            raise ValueError(f"{len(packed)} bytes, at most {MAX_BYTES}")
        return packed

    @staticmethod
    def loads(data: bytes) -> Any:
        if len(data) > MAX_BYTES:
            raise ValueError(f"{len(data)} bytes, at most {MAX_BYTES}")
        return msgpack.unpackb(data, raw=False, strict_map_key=True, max_ext_len=0)


class OperationCancelled(RolloutMQError):
    """An operator cancelled the operation while it ran."""


class OperationJob(Job):
    """A job that can only be an operation."""

    serves: tuple[str, str] | None = None
    """The Redis and the pool of the worker that runs it, from the worker's own settings: no job can point elsewhere."""
    cancelled = False
    """Whether an operator had cancelled it when its record was read."""

    @classmethod
    def fetch(cls, id: str, connection: Redis | None = None, serializer: Any = None) -> OperationJob:
        """Like RQ's, but an unreadable record counts as missing, so that it does not end the worker."""
        try:
            job = super().fetch(id, connection=connection, serializer=serializer)
        except (RedisError, NoSuchJobError):
            raise
        except Exception as error:
            _log.warning("job %.80r cannot be read and is not run: %s: %s", id, type(error).__name__, error)
            raise NoSuchJobError(str(error)) from None
        assert isinstance(job, cls)
        return job

    def restore(self, raw_data: dict[Any, Any]) -> Any:
        """Take the fields that operations use; callbacks, webhooks, dependents and repeats stay where they are."""
        kept = {key: value for key, value in raw_data.items() if key.decode(errors="replace") in _READ}
        if any(len(value) > MAX_BYTES for value in kept.values()):
            raise ValueError(f"a field of more than {MAX_BYTES} bytes")
        if b"data" in kept:
            _check_unpacked(kept[b"data"])
        super().restore(kept)
        self.cancelled = CANCELLED.encode() in raw_data
        self.description = self.description or self.id
        try:
            _ = self.func_name  # unpacks the call
        except DeserializationError:
            # RQ reads the name in places where an error would be taken for its own.
            self.func_name, self.instance, self.args, self.kwargs = UNREADABLE, None, [], {}

    @property
    def func(self) -> Any:
        """Never imported: an operation has no function that could be named."""
        raise ForeignJob(f"job {self.id} was asked for its function")

    def call(self) -> tuple[object, object]:
        """(operation, parameters) as the job has them. Raises ForeignJob."""
        entry, instance, args, kwargs = self.func_name, self.instance, self.args, self.kwargs
        if entry != ENTRY or instance is not None or kwargs or not isinstance(args, list | tuple) or len(args) != 2:
            raise ForeignJob(f"job {self.id} names {str(entry)[:80]!r} and is no operation: it was not run")
        return args[0], args[1]

    def perform(self) -> Any:
        """Run the operation. A RolloutMQError is final, because a retry would raise it again; a RedisError is not."""
        try:
            name, params = self.call()
            if self.serves is None:
                raise ConfigError("operations run in `rolloutmq ops worker`, not in a worker of RQ's own")
            self.connection.persist(self.key)
            notes = self.meta.get("notes") if isinstance(self.meta, dict) else None
            redis_url, pool = self.serves
            noted = notes if isinstance(notes, dict) else None
            work = run_operation(name, params, redis_url=redis_url, pool=pool, report=self._report, notes=noted)
            return asyncio.run(self._unless_cancelled(work))
        except RolloutMQError as error:
            if not isinstance(error, RedisError):
                self.retries_left = 0
            self._report({**self.meta, "error": f"{type(error).__name__}: {error}"[:2000]})
            if isinstance(error, ForeignJob):
                _log.error("refused: %s", error)
            raise

    async def _unless_cancelled(self, work: Coroutine[Any, Any, Any]) -> Any:
        """What `work` returns. Cancels it, and raises OperationCancelled, when an operator has cancelled the operation.

        RQ's own way to stop a job is a message that its worker must hear at that moment, and a SIGKILL. The field in
        the record also reaches an operation whose worker died and that is started again.
        """
        task = asyncio.create_task(work)
        while not task.done():
            if self.cancelled or await asyncio.to_thread(self._is_cancelled):
                task.cancel()
                break
            await asyncio.wait({task}, timeout=LOOK_S)
        await asyncio.wait({task})  # while it cleans up
        if task.cancelled():
            raise OperationCancelled(f"operation {self.id} was cancelled")
        return task.result()

    def _is_cancelled(self) -> bool:
        with contextlib.suppress(RedisError):
            return bool(self.connection.hexists(self.key, CANCELLED))
        return False

    def retry(self, queue: Queue, pipeline: Pipeline) -> None:
        """Like RQ's, but it saves the newest notes of the run that was cut off. RQ would save those it began with."""
        with contextlib.suppress(ValueError):
            self.get_meta()
        super().retry(queue, pipeline)

    def _report(self, seen: dict[str, Any]) -> None:
        self.meta = seen
        # Writing would bring back a job that was deleted meanwhile, as a record without a TTL.
        if self.connection.exists(self.key):
            self.save_meta()  # type: ignore[no-untyped-call]


def _check_unpacked(data: bytes) -> None:
    """Raises ValueError for a zlib record that RQ would unpack to more than MAX_BYTES."""
    unpacker = zlib.decompressobj()
    try:
        unpacker.decompress(data, MAX_BYTES)
    except zlib.error:
        return  # RQ takes it as it is then
    if unpacker.unconsumed_tail:
        raise ValueError(f"more than {MAX_BYTES} bytes unpacked")
