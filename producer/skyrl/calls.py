"""The engine's calls under way: their jobs in the pool, whether they were stopped, and the gate that they pass."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

from ...messages.errors import JobFailed, RolloutMQError, WaitTimeout
from ...messages.model import GenerateJob, JobFailure, RolloutResult
from ..calls import Delta
from ..client import RolloutClient
from ..inbox import JobHandle
from .core import EngineCore

SLICE = 256
"""Jobs submitted at a time. The first results of a large batch are read while its last prompts are submitted."""
AHEAD = 1024
"""Deltas that may wait for a slow caller."""
GIVE_UP_S = 5.0
"""Seconds to cancel jobs that no caller waits for."""


class Call:
    """One call of `generate` or a similar method.

    open: its submitted jobs that have no outcome yet. passed: it has passed the gate. ended: it is not under way now.
    """

    def __init__(self, client: RolloutClient, timeout_s: float | None) -> None:
        self._client, self._timeout_s = client, timeout_s
        self.stopped = False
        self.passed, self.ended = False, asyncio.Event()
        self.open: dict[str, JobHandle] = {}

    async def run(self, jobs: Sequence[GenerateJob]) -> list[list[RolloutResult | None]]:
        """Submit jobs and wait for all samples, by job and number. A sample that was aborted before it began is None.

        Raises JobFailed for the first job that ended without all of its samples and was not stopped, and WaitTimeout
        after the engine's `timeout_s`. If it ends early, it cancels its jobs in the pool.
        """
        deadline = None if self._timeout_s is None else time.monotonic() + self._timeout_s
        await self._client.check(jobs)
        handles: asyncio.Queue[JobHandle | None] = asyncio.Queue()
        submitting = asyncio.create_task(self._submit(jobs, handles, deadline))
        found: list[list[RolloutResult | None]] = []
        try:
            while (handle := await handles.get()) is not None:
                found.append(await self._ending(handle, deadline))
            await submitting  # its error, if it had one
        except BaseException:
            await self._give_up([submitting])
            raise
        return found + [[None] * job.n for job in jobs[len(found) :]]  # those that were stopped before their turn

    async def _submit(
        self, jobs: Sequence[GenerateJob], handles: asyncio.Queue[JobHandle | None], deadline: float | None
    ) -> None:
        try:
            for start in range(0, len(jobs), SLICE):
                if self.stopped:
                    return
                for handle in await self._submit_slice(jobs[start : start + SLICE], _left(deadline)):
                    handles.put_nowait(handle)
        finally:
            handles.put_nowait(None)

    async def _submit_slice(self, jobs: Sequence[GenerateJob], timeout: float | None) -> list[JobHandle]:
        self.open.update((job.id, JobHandle(job.id, job.group, job.n)) for job in jobs)
        handles = await self._client.submit_many(jobs, timeout=timeout)
        if self.stopped:  # while they were on their way: whoever stopped the call could not stop these
            await self._client.stop([job.id for job in jobs])
        return handles

    async def _ending(self, handle: JobHandle, deadline: float | None) -> list[RolloutResult | None]:
        ended = await self._client.ending(handle, _left(deadline))
        failure = ended.failures[0] if ended.failures else None
        self.open.pop(handle.job_id, None)
        if failure is not None and not self._aborted(failure):
            raise JobFailed(failure)
        by_number = {result.sample: result for result in ended.results}
        if failure is None and len(by_number) != handle.n:
            raise RolloutMQError(
                f"{len(by_number)} of {handle.n} samples came of a job that is done: somebody took the others"
            )
        return [by_number.get(number) for number in range(handle.n)]

    async def stream(self, jobs: Sequence[GenerateJob]) -> AsyncGenerator[Delta]:
        """The deltas of several jobs as they arrive: all of each sample, unless the call is stopped.

        Raises as `run`, with `timeout_s` from one delta of a job to the next. If the caller leaves it early, it cancels
        its jobs in the pool.
        """
        arrived: asyncio.Queue[Delta | BaseException | None] = asyncio.Queue(AHEAD)
        await self._client.check(jobs)
        tasks = [asyncio.create_task(self._follow(job, arrived)) for job in jobs]
        left = len(tasks)
        try:
            while left:
                item = await arrived.get()
                if isinstance(item, Delta):
                    yield item
                elif item is not None:
                    raise item
                else:
                    left -= 1
        finally:
            await self._give_up(tasks)

    async def _follow(self, job: GenerateJob, arrived: asyncio.Queue[Delta | BaseException | None]) -> None:
        """Put the deltas of a job into the queue, then the error that ended it, or None."""
        ended: BaseException | None = None
        try:
            if not self.stopped:
                streamed = job.model_copy(update={"stream": True})
                (handle,) = await self._submit_slice([streamed], self._timeout_s)
                async for delta in self._client.stream(handle, timeout=self._timeout_s):
                    await arrived.put(delta)
                self.open.pop(job.id, None)
        except JobFailed as error:
            self.open.pop(job.id, None)
            if not self._aborted(error.failure):
                ended = error
        except Exception as error:
            ended = error
        await arrived.put(ended)

    def _aborted(self, failure: Any) -> bool:
        """Whether a job failed because this call was stopped before the job began."""
        return self.stopped and isinstance(failure, JobFailure) and failure.outcome == "cancelled"

    async def _give_up(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        """End the tasks and cancel open jobs. Nothing of this call goes on in the pool, and nothing is kept here."""
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        jobs, self.open = self.open, {}
        if not jobs or self._client.closed:  # whoever closed the client has cancelled everything
            return
        with contextlib.suppress(RolloutMQError, TimeoutError):
            async with asyncio.timeout(GIVE_UP_S):
                await self._client.cancel(list(jobs))
                for handle in jobs.values():
                    with contextlib.suppress(RolloutMQError):
                        await self._client.ending(handle)


class Calls:
    """All calls of one engine, and their gate. paused: the gate is closed, and new calls wait for it to open."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self.under_way: set[Call] = set()
        self.paused = False
        self._changed = asyncio.Condition()
        core.when_loop_changes.append(self._renew)

    def _renew(self) -> None:
        self.under_way, self._changed = set(), asyncio.Condition()

    @contextlib.asynccontextmanager
    async def begin(self) -> AsyncIterator[Call]:
        """A call that has passed the gate. It is under way until the block ends.

        The gate lets a call through when the engine is not paused, or when the call was stopped.
        """
        call = Call(await self._core.client(), self._core.timeout_s)
        self.under_way.add(call)
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: not self.paused or call.stopped)
            call.passed = True
            yield call
        finally:
            self.under_way.discard(call)
            call.ended.set()

    async def idle(self, timeout: float) -> None:
        """Wait until the calls that have passed the gate have ended, for `timeout` seconds at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                for call in [call for call in self.under_way if call.passed]:
                    await call.ended.wait()

    async def set_paused(self, paused: bool) -> None:
        """Close or open the gate."""
        await self._core.client()
        async with self._changed:
            self.paused = paused
            self._changed.notify_all()

    async def stop_all(self) -> None:
        """End every call with the samples that it has."""
        client = await self._core.client()
        async with self._changed:
            calls = list(self.under_way)
            for call in calls:
                call.stopped = True
            self._changed.notify_all()
        if jobs := [job for call in calls for job in call.open]:
            await client.stop(jobs)


def _left(deadline: float | None) -> float | None:
    """Seconds until `deadline`. Raises WaitTimeout when there are none."""
    if deadline is None:
        return None
    left = deadline - time.monotonic()
    if left <= 0:
        raise WaitTimeout("the engine's timeout_s are over")
    return left
