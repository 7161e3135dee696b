"""Calls under way: which jobs each has in the pool, who was told to end with what it has, and the gate they pass."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Sequence

from ...messages.errors import JobFailed, RolloutMQError, WaitTimeout
from ...messages.model import GenerateJob, JobFailure, RolloutResult
from ..client import RolloutClient
from ..inbox import JobHandle

SLICE = 256
"""Jobs submitted at a time, so that a large batch's first results are taken while its last prompts go in."""
GIVE_UP_S = 5.0
"""For cancelling what nobody waits for any more."""


class Call:
    """One generate. open: the jobs it has submitted and not yet the outcome of."""

    def __init__(self) -> None:
        self._stopped = False
        self.open: dict[str, JobHandle] = {}

    def stop(self) -> None:
        """It is to end with what there is."""
        self._stopped = True

    def stopped(self) -> bool:
        """Whether somebody said so."""
        return self._stopped


class Calls:
    """Of one engine, on one event loop. The gate is closed while the engine is paused."""

    def __init__(self, paused: bool = False) -> None:
        self._under_way: set[Call] = set()
        self._changed = asyncio.Condition()
        self.paused = paused

    @contextlib.contextmanager
    def begin(self) -> Iterator[Call]:
        """For as long as a call lasts."""
        call = Call()
        self._under_way.add(call)
        try:
            yield call
        finally:
            self._under_way.discard(call)

    async def pass_gate(self, call: Call) -> None:
        """Wait while the engine is paused, or until the call is stopped."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self.paused or call.stopped())

    async def set_paused(self, paused: bool) -> None:
        """Close or open the gate."""
        async with self._changed:
            self.paused = paused
            self._changed.notify_all()

    async def stop_all(self, client: RolloutClient) -> int:
        """Every call ends with what it has; returns how many jobs the pool was told to stop."""
        async with self._changed:
            calls = list(self._under_way)
            for call in calls:
                call.stop()
            self._changed.notify_all()
        jobs = [job for call in calls for job in call.open]
        return await client.stop(jobs) if jobs else 0


async def run_jobs(
    client: RolloutClient, call: Call, jobs: Sequence[GenerateJob], timeout_s: float | None
) -> list[list[RolloutResult | None]]:
    """Submit jobs and wait for all of their samples, by job and number; None for those aborted before they began.

    Raises JobFailed for the first job that has an end other than its samples (and was not stopped), WaitTimeout when
    `timeout_s` are over. Whatever ends it early, what it has in the pool is cancelled.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    await client.check(jobs)
    handles: asyncio.Queue[JobHandle | None] = asyncio.Queue()
    submitting = asyncio.create_task(_submit(client, call, jobs, handles, deadline))
    found: list[list[RolloutResult | None]] = []
    try:
        while (handle := await handles.get()) is not None:
            found.append(await _ending(client, call, handle, deadline))
        await submitting  # its error, if it had one
    except BaseException:
        await _give_up(client, call, submitting)
        raise
    found += [[None] * job.n for job in jobs[len(found) :]]  # stopped before they were submitted
    return found


async def _submit(
    client: RolloutClient,
    call: Call,
    jobs: Sequence[GenerateJob],
    handles: asyncio.Queue[JobHandle | None],
    deadline: float | None,
) -> None:
    try:
        for start in range(0, len(jobs), SLICE):
            if call.stopped():
                return
            part = jobs[start : start + SLICE]
            call.open.update((job.id, JobHandle(job.id, job.group, job.n)) for job in part)
            for handle in await client.submit_many(part, timeout=_left(deadline)):
                handles.put_nowait(handle)
            if call.stopped():  # meanwhile: whoever stopped it did it before these were there
                await client.stop([job.id for job in part])
    finally:
        handles.put_nowait(None)


async def _ending(
    client: RolloutClient, call: Call, handle: JobHandle, deadline: float | None
) -> list[RolloutResult | None]:
    ended = await client.ending(handle, _left(deadline))
    failure = ended.failures[0] if ended.failures else None
    call.open.pop(handle.job_id, None)
    if failure is not None and not (call.stopped() and failure.outcome == "cancelled"):
        raise JobFailed(failure)
    return in_order(ended.results, handle.n, failure)


def in_order(results: Sequence[RolloutResult], n: int, failure: JobFailure | None) -> list[RolloutResult | None]:
    """A job's samples by number; None where a stopped job has none."""
    by_number = {result.sample: result for result in results}
    if failure is None and len(by_number) != n:
        raise RolloutMQError(f"{len(by_number)} of {n} samples came of a job that is done: somebody took the others")
    return [by_number.get(number) for number in range(n)]


def _left(deadline: float | None) -> float | None:
    """Seconds until `deadline`. Raises WaitTimeout when there are none."""
    if deadline is None:
        return None
    left = deadline - time.monotonic()
    if left <= 0:
        raise WaitTimeout("the engine's timeout_s are over")
    return left


async def _give_up(client: RolloutClient, call: Call, submitting: asyncio.Task[None]) -> None:
    """Nobody waits any more: nothing of the call goes on in the pool, and nothing of it is kept here."""
    submitting.cancel()
    await asyncio.gather(submitting, return_exceptions=True)
    jobs, call.open = call.open, {}
    if not jobs or client.closed:  # whoever closed it has cancelled everything
        return
    with contextlib.suppress(RolloutMQError, TimeoutError):
        async with asyncio.timeout(GIVE_UP_S):
            await client.cancel(list(jobs))
            for handle in jobs.values():
                with contextlib.suppress(RolloutMQError):
                    await client.ending(handle)
