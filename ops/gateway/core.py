"""From jobs to results: how every door of a gateway runs its requests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ...messages.errors import JobFailed, RolloutMQError
from ...messages.model import GenerateJob, RolloutResult
from ...messages.redis import insist
from ...producer.calls import Delta, LastWorkers, Streams, run
from ...producer.core import ClientCore
from ...producer.inbox import Group, Handle, HandOut
from ..http import Refused

ROOM_S = 20.0
"""A request waits so long for room in a full pool: less than any client waits for an answer."""
Keep = Callable[[list[Group]], Awaitable[None]]
"""Makes durable what came of a request's jobs, before Redis forgets it."""


@dataclass(frozen=True, slots=True)
class Member:
    """A tenant's client in this process. The pool serves tenants by turns."""

    core: ClientCore
    streams: Streams

    async def close(self) -> None:
        """What it has open goes on, for whoever inherits it."""
        await self.streams.close()
        await self.core.close()


class Core:
    """Runs jobs for tenants."""

    def __init__(self, redis_url: str, pool: str, join: Callable[[str], Awaitable[str]]) -> None:
        """join(tenant): the id for this gateway's client of a tenant."""
        self._url, self._pool, self._join = redis_url, pool, join
        self._members: dict[str, asyncio.Task[Member]] = {}
        self._workers = LastWorkers()
        self.gone: set[str] = set()
        """Clients that were closed: what they had is for whoever inherits."""

    async def member(self, tenant: str) -> Member:
        """The client of a tenant. Raises RedisUnavailable."""
        task = self._members.get(tenant)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = self._members[tenant] = asyncio.create_task(self._member(tenant))
        return await asyncio.shield(task)

    async def _member(self, tenant: str) -> Member:
        client_id = await self._join(tenant)
        core = ClientCore(self._url, self._pool, client_id=client_id, max_outstanding=1 << 20, caps=None)
        try:
            await core.open()
        except BaseException:
            await core.close()
            raise
        return Member(core, Streams(core))

    async def close(self, only: Container[str] | None = None) -> None:
        """Close the clients, or only those with these ids: others have inherited, and requests get another client."""
        tasks = dict(self._members)
        members = await asyncio.gather(*tasks.values(), return_exceptions=True)
        for tenant, member in zip(tasks, members, strict=True):
            if isinstance(member, Member) and (only is None or member.core.client_id in only):
                if self._members.get(tenant) is tasks[tenant]:
                    del self._members[tenant]
                self.gone.add(member.core.client_id)
                await member.close()

    async def run(
        self, tenant: str, jobs: Sequence[GenerateJob], keep: Keep | None = None, owner: str = ""
    ) -> list[Group]:
        """What came of each job. A call that is cancelled cancels its jobs.

        owner: the client that has to run them; another one could not keep what comes. Raises PoolBusy and InvalidField,
        and Refused if others have inherited from this gateway.
        """
        member = await self._owned(tenant, owner)
        with self._left(member):
            near = [self._near(tenant, job) for job in jobs]
            groups = await run(member.core, near, ROOM_S, partial(_kept, member, keep))
        self._note(tenant, groups)
        return groups

    async def _owned(self, tenant: str, owner: str) -> Member:
        member = await self.member(tenant)
        if owner not in {"", member.core.client_id}:
            raise _replaced()
        return member

    @contextlib.contextmanager
    def _left(self, member: Member) -> Iterator[None]:
        """Whatever goes wrong because others have inherited from this client is told as that."""
        try:
            yield
        except RolloutMQError:
            if not member.core.reader.over:
                raise
            self.gone.add(member.core.client_id)
            raise _replaced() from None

    async def stream(
        self, tenant: str, jobs: Sequence[GenerateJob], keep: Keep | None = None, owner: str = ""
    ) -> Stream:
        """Begin jobs whose tokens are wanted as they come. Raises what `run` raises, before anything is streamed."""
        member = await self._owned(tenant, owner)
        streamed = [self._near(tenant, job).model_copy(update={"stream": True}) for job in jobs]
        with self._left(member):
            try:
                handles = await member.core.submit_many(streamed, ROOM_S)
            except BaseException:  # some may have been accepted
                await member.core.give_up([job.id for job in streamed], ended_too=True)
                raise

        async def kept(groups: list[Group]) -> None:
            await _kept(member, keep, groups)
            self._note(tenant, groups)

        return Stream(member, handles, kept, self._left)

    def _near(self, tenant: str, job: GenerateJob) -> GenerateJob:
        """The job, which prefers the worker that has the beginning of its session in its cache."""
        worker = self._workers.get((tenant, job.session_id)) if job.session_id is not None else None
        if worker is None or job.prefer_worker is not None:
            return job
        return job.model_copy(update={"prefer_worker": worker})

    def _note(self, tenant: str, groups: Sequence[Group]) -> None:
        for sample in (sample for group in groups for sample in group.results):
            if sample.session_id is not None:
                self._workers.note((tenant, sample.session_id), sample.worker_id)


async def _kept(member: Member, keep: Keep | None, groups: list[Group]) -> None:
    """Keep what came, however long Redis is away: what is given up here is lost.

    No deadline bounds this, the jobs' have no say any more. It ends with the request, if it is cancelled, and with the
    client: whoever inherits from it keeps what it could not.
    """
    if keep is not None:
        await insist(partial(keep, groups), over=lambda: member.core.reader.over)


def _replaced() -> Refused:
    return Refused(
        503, "gateway_left", "Others took this gateway for dead, and have its work. Ask again.", retry_after_s=1
    )


class Stream:
    """The tokens of jobs as they come. It goes on by itself until the jobs have ended, or `task` is cancelled.

    task: returns what came of the jobs, when it is kept.
    """

    def __init__(
        self,
        member: Member,
        handles: Sequence[Handle],
        keep: Keep,
        left: Callable[[Member], contextlib.AbstractContextManager[None]],
    ) -> None:
        self._member, self._handles, self._keep, self._left = member, handles, keep, left
        self._held: list[HandOut] = []
        self._came: asyncio.Queue[Delta | None] = asyncio.Queue(64)
        self._heard = True
        self.task = asyncio.create_task(self._work())

    async def deltas(self, *, stay: bool) -> AsyncGenerator[Delta]:
        """All jobs' deltas, in any order of the jobs, and the end when all is kept. Raises JobFailed and Refused.

        stay: see `leave`, which leaving this loop calls.
        """
        try:
            while (delta := await self._came.get()) is not None:
                yield delta
            with self._left(self._member):
                for failure in (failure for group in await self.task for failure in group.failures):
                    raise JobFailed(failure)
        finally:
            self.leave(stay=stay)

    def leave(self, *, stay: bool) -> None:
        """Nobody listens any more. stay: whether the jobs go on; else they are cancelled."""
        if not self.task.done():
            self._heard = False
            while not self._came.empty():
                self._came.get_nowait()
            if not stay:
                self.task.cancel()

    async def _work(self) -> list[Group]:
        kept = False
        try:
            groups = await asyncio.gather(*(self._of(handle) for handle in self._handles))
            await self._keep(groups)
            kept = True
            return groups
        finally:
            for out in self._held if kept or not self._member.core.reader.over else ():
                out.acknowledge()
            if not kept:
                await self._member.core.give_up([one.job_id for one in self._handles], ended_too=True)
            await self._say(None)

    async def _of(self, handle: Handle) -> Group:
        results: list[RolloutResult] = []
        failures: list[Any] = []
        try:
            async for delta in self._member.streams.of(handle, None, self._held):
                if delta.result is not None:
                    results.append(delta.result)
                await self._say(delta)
        except JobFailed as failed:
            failures.append(failed.failure)
        return Group(handle.group_id, tuple(sorted(results, key=lambda it: it.sample)), tuple(failures))

    async def _say(self, delta: Delta | None) -> None:
        if self._heard:
            await self._came.put(delta)
