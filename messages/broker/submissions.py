"""Jobs on their way into the queue: encoded, in batches; and whether two of them are the same job."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import msgpack
from pydantic import BaseModel

from ..codec import HEADER, JOBS, Job, decode_one_of, encode
from ..errors import InvalidField, MessageError
from ..model import PRIORITIES
from ..scripts import calls
from .needs import needs_of

BATCH_JOBS = 256
NOT_ITS_OWN = ("stream", "trace_id")
"""Fields that make no other job of a job: how its client reads it, and which trace this submission of it belongs to."""
ENDS_BYTES = 1 << 15
"""So much of each end of a longer payload is in its digest. What is longer holds media."""
BATCH_BYTES = 4 << 20
"""One script call accepts at most this much, so that Redis is never busy with one client for long."""


def batches(jobs: Sequence[Job], most: int) -> Iterator[list[calls.Submission]]:
    """Jobs as the script takes them. Raises InvalidField for one over `most` bytes."""
    batch: list[calls.Submission] = []
    size = 0
    for job in jobs:
        if not job.reply_to:
            raise InvalidField("reply_to", job.reply_to, "the id of the client that reads the results")
        payload = encode(job)
        if len(payload) > most:
            raise InvalidField("job", f"{len(payload)} bytes", f"at most {most} bytes encoded")
        if batch and (len(batch) >= BATCH_JOBS or size + len(payload) > BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(
            calls.Submission(
                job_id=job.id,
                payload=payload,
                n=job.n,
                priority=PRIORITIES.index(job.priority),
                client=job.reply_to,
                min_version=job.min_version if job.exact_version is None else f"={job.exact_version}",
                max_staleness="" if job.max_staleness is None else job.max_staleness,
                deadline_ms="" if job.deadline_s is None else max(1, round(job.deadline_s * 1000)),
                group=job.group_id,
                adapter="" if job.lora is None else f"{job.lora}@{job.min_adapter_version}",
                prefers=_preference(job),
                digest=digest(job, payload),
                needs=needs_of(job),
            )
        )
        size += len(payload)
    if batch:
        yield batch


def same_job(one: bytes, other: bytes) -> bool:
    """Whether two payloads are the same job, whichever of its defaults were written out. See NOT_ITS_OWN."""
    try:
        first, second = (decode_one_of(it, JOBS).model_dump() | dict.fromkeys(NOT_ITS_OWN) for it in (one, other))
    except MessageError:
        return False
    return first == second


def digest(job: Job, payload: bytes) -> bytes:
    """8 bytes that tell a job that has ended from another one under its id: of its kind, its length and what it says.

    Fields at their default are left out, and so is what NOT_ITS_OWN names, as in `same_job`.
    """
    left_out = _left_out(job)
    if left_out:
        payload = payload[:HEADER] + msgpack.packb(
            job.model_dump(exclude_unset=True, exclude_none=True, exclude=left_out), use_bin_type=True
        )
    said = hashlib.sha1(len(payload).to_bytes(8, "big"), usedforsecurity=False)
    said.update(payload if len(payload) <= 2 * ENDS_BYTES else payload[:ENDS_BYTES] + payload[-ENDS_BYTES:])
    return said.digest()[:8]


def _left_out(message: BaseModel) -> dict[str, Any]:
    """Fields that do not count, in the form of pydantic's `exclude`."""
    found: dict[str, Any] = {}
    defaults = _defaults(type(message))
    for name in message.model_fields_set:
        value, default = getattr(message, name), defaults[name]
        if value is default or name in NOT_ITS_OWN or (type(value) is type(default) and value == default):
            found[name] = True
        elif isinstance(value, BaseModel) and (inner := _left_out(value)):
            found[name] = inner if len(inner) < len(value.model_fields_set) or True not in inner.values() else True
    return found


@cache
def _defaults(kind: type[BaseModel]) -> dict[str, Any]:
    return {name: field.get_default(call_default_factory=True) for name, field in kind.model_fields.items()}


def _preference(job: Any) -> str:
    worker = getattr(job, "prefer_worker", None)  # only of jobs that generate
    return "" if worker is None else f"{max(1, round(job.prefer_s * 1000))}@{worker}"
