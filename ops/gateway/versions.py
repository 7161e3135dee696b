"""Versions in requests, as external rollout services have them: which weights may answer, and which did.

miles' docs/advanced/disaggregated-rollout.md is the contract. A pool that has no such weights now answers 409, so that
the client asks again; one that would rather wait says for how long.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence

from redis.exceptions import RedisError
from starlette.responses import JSONResponse

from ...messages.errors import InvalidField
from ...messages.model import GenerateJob
from ..http import Refused
from .facts import PoolFacts, serves

WAIT_HEADER = "x-weight-version-wait"
MOST_WAIT_S = 3600.0
LOOK_S = 0.2
LOST_S = 5.0


class VersionNotReady(Refused):
    """No worker has the weights that a request asks for. target: their version; applied: the newest that one has."""

    def __init__(self, target: int, applied: int | None, exact: bool) -> None:
        wanted = f"exactly version {target}" if exact else f"version {target} or newer"
        has = "no worker serves" if applied is None else f"the newest that a worker has is {applied}"
        super().__init__(409, "WeightVersionNotReady", f"no worker has weights of {wanted}: {has}")
        self.target, self.applied = target, applied

    @property
    def response(self) -> JSONResponse:
        """{"type", "target_version", "applied", "message"}."""
        said = {"type": self.code, "target_version": self.target, "applied": self.applied, "message": str(self)}
        return JSONResponse(said, self.status)


def wait_s(headers: Mapping[str, str]) -> float:
    """Seconds that the client will wait for its version. Raises InvalidField."""
    said = headers.get(WAIT_HEADER, "0")
    try:
        found = float(said)
    except ValueError:
        found = -1.0
    if not 0.0 <= found <= MOST_WAIT_S:
        raise InvalidField(WAIT_HEADER, said, f"seconds from 0 to {MOST_WAIT_S:g}")
    return found


async def watch_versions(facts: PoolFacts, jobs: Sequence[GenerateJob]) -> None:
    """Raises VersionNotReady once no worker could have served these jobs for LOST_S: those that could are gone."""
    lost_at = None
    while lost_at is None or time.monotonic() - lost_at < LOST_S:
        await asyncio.sleep(1.0)
        with contextlib.suppress(RedisError, OSError, TimeoutError):
            try:
                await check_versions(facts, jobs, 0.0)
                lost_at = None
            except VersionNotReady as error:
                lost_at, lost = lost_at or time.monotonic(), error
    raise lost


async def check_versions(facts: PoolFacts, jobs: Sequence[GenerateJob], seconds: float) -> None:
    """Return when a worker could serve these jobs. Raises VersionNotReady if none can within `seconds`."""
    exact = max((job.exact_version for job in jobs if job.exact_version is not None), default=None)
    target = exact if exact is not None else max(job.min_version for job in jobs)
    ends = time.monotonic() + seconds
    while True:
        have = [worker.version for worker in (await facts.read(LOOK_S)).alive if serves(worker)]
        if any(version == exact if exact is not None else version >= target for version in have):
            return
        if time.monotonic() >= ends:
            raise VersionNotReady(target, max(have, default=None), exact is not None)
        await asyncio.sleep(LOOK_S)
