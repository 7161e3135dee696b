"""Reads jobs' records, by the names of their fields."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..redis import JOB, Keys, is_wrong_type


async def read_jobs(redis: Any, keys: Keys, job_ids: Iterable[str], *names: str) -> list[dict[str, bytes]]:
    """For each job those of these fields (names of `JOB`) that its record has; none if there is no such record."""
    fields = [getattr(JOB, name) for name in names]
    async with redis.pipeline(transaction=False) as pipe:
        for job_id in job_ids:
            pipe.hmget(keys.job(job_id), fields)
        rows = await pipe.execute(raise_on_error=False)
    found = []
    for row in rows:
        if isinstance(row, Exception) and not is_wrong_type(row):
            raise row
        values = () if isinstance(row, Exception) else zip(names, row, strict=True)
        found.append({name: value for name, value in values if value is not None})
    return found
