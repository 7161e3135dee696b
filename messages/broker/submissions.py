"""Jobs on their way into the queue: encoded, in batches; and whether two of them are the same job."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ..codec import JOBS, Job, decode_one_of, encode
from ..errors import InvalidField, MessageError
from ..model import PRIORITIES
from ..scripts import calls

BATCH_JOBS = 512
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
                min_version=job.min_version,
                max_staleness="" if job.max_staleness is None else job.max_staleness,
                deadline_ms="" if job.deadline_s is None else max(1, round(job.deadline_s * 1000)),
                group=job.group_id,
                adapter="" if job.lora is None else f"{job.lora}@{job.min_adapter_version}",
                prefers=_preference(job),
            )
        )
        size += len(payload)
    if batch:
        yield batch


def same_job(one: bytes, other: bytes) -> bool:
    """Whether two payloads are the same job, whichever of its defaults were written out, and streamed or not."""
    try:
        first, second = (decode_one_of(it, JOBS).model_dump() | {"stream": None} for it in (one, other))
    except MessageError:
        return False
    return first == second


def _preference(job: Any) -> str:
    worker = getattr(job, "prefer_worker", None)  # only of jobs that generate
    return "" if worker is None else f"{max(1, round(job.prefer_s * 1000))}@{worker}"
