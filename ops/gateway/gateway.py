"""The gateway: what doors ask for becomes jobs, with what keys and sessions of requests promise."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

from ...messages.broker import RecordedSessions, broker_of
from ...messages.errors import ConfigError, JobFailed
from ...messages.model import EmbedJob, GenerateJob, JobFailure, RolloutResult
from ...messages.redis import connect, ping
from ...producer.calls import Delta, Watched
from ...producer.data import Texts
from ...producer.inbox import Group
from .answers import Answer
from .call import Call, ClientGone
from .core import Core, Keep
from .facts import PoolFacts
from .heir import Gateways
from .http import Refused
from .quotas import Quotas
from .requests import Request, RequestLost, Requests
from .settings import Settings
from .tenants import Tenants

log = logging.getLogger(__name__)
WAIT_S = 5.0
TOKENIZER_S = 60.0
"""A tokenizer that could not be loaded is looked for again after so many seconds."""
Results = list[list[RolloutResult]]
"""The samples of each of a request's jobs, in order."""
T = TypeVar("T")
J = TypeVar("J", GenerateJob, EmbedJob)


class Gateway:
    """One gateway process of a pool."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._redis = connect(settings.redis, pool=settings.pool)
        broker = broker_of(self._redis, settings.pool)
        self.facts = PoolFacts(broker, settings.name)
        self.texts = Texts(settings.tokenizer)
        self.tenants = Tenants.load(settings.keys)
        self.quotas = Quotas(self._redis, settings.pool)
        self.requests = Requests(self._redis, settings.pool)
        self.sessions = RecordedSessions(broker)
        self.core = Core(settings.redis, settings.pool, self._join)
        self._gateways = Gateways(settings.redis, self.requests, record=self._record, renamed=self.core.close)
        self._running: dict[str, asyncio.Task[Any]] = {}  # requests with keys, while this gateway runs them
        self.loaded: Callable[[], None] = lambda: None
        """Called when the tokenizer is there, the last of what stays."""
        self._tokenizer: Any = None
        self._look_at = 0.0

    async def _join(self, tenant: str) -> str:
        return await self._gateways.join(tenant)

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """The gateway works inside the block. Raises RedisUnavailable."""
        await ping(self._redis)
        beating = asyncio.create_task(self._gateways.run())
        try:
            async with self.quotas.run():
                yield
        finally:
            beating.cancel()
            await self.core.close()
            await self._gateways.leave()
            await self._redis.aclose()

    async def results(self, call: Call, jobs: Sequence[GenerateJob]) -> Results:
        """The results of a call's jobs. Raises JobFailed, ClientGone, and what refuses jobs and keys."""
        if not call.kept:
            return results_of(_answer(await call.unless_gone(self.core.run(call.tenant.name, jobs))))
        request = await self.begin(call, jobs)
        try:
            return results_of(await call.unless_gone(self._wait(call, jobs, request)))
        except ClientGone:
            if call.key is None and (task := self._running.get(request.id)) is not None:
                task.cancel()
            raise

    async def stream(self, call: Call, jobs: Sequence[GenerateJob]) -> AsyncGenerator[Delta]:
        """The tokens of a call's jobs. Raises as `results` does, at once or while they come.

        What another gateway generates comes as a whole. Closing the generator before its end is hanging up.
        """
        tenant = call.tenant.name
        if not call.kept:
            return (await self.core.stream(tenant, jobs)).deltas(stay=False)
        request = await self.begin(call, jobs)
        if request.state != "new":
            return _deltas(await call.unless_gone(self._wait(call, jobs, request)))
        try:
            stream = await self.core.stream(tenant, named(request, jobs), self._keep(request), request.owner)
        except BaseException:
            await self.requests.drop(request)
            raise
        self._mine(request, stream.ended())
        return stream.deltas(stay=call.key is not None)

    async def begin(self, call: Call, jobs: Sequence[GenerateJob]) -> Request:
        """Begin the request of a call with a key or a session, or find it. Raises KeyReused and PoolBusy."""
        member = await self.core.member(call.tenant.name)
        call.request = await self.requests.begin(
            call.tenant.name,
            call.key or call.digest.hex(),
            call.digest,
            member.core.client_id,
            prompts=[job.token_ids for job in jobs],
            only_new=call.key is None and not call.repeat,
            about=call.about if call.key is not None else b"",
        )
        return call.request

    def job(self, call: Call, job: J) -> J:
        """A job of a call, with what its tenant has and what every request here has."""
        more: dict[str, Any] = {} if job.deadline_s is not None else {"deadline_s": self.settings.deadline_s}
        if call.tenant.priority is not None:
            more["priority"] = call.tenant.priority
        return job.model_copy(update=more) if more else job

    async def tokenizer(self) -> Any:
        """The model's; None if this host has none, so that workers make tokens and text."""
        if self._tokenizer is None and time.monotonic() >= self._look_at:
            if self.texts.model is None and not self.texts.given:
                self.texts.model = (await self.facts.model()).path or None
            try:
                self._tokenizer = await asyncio.to_thread(self.texts.load)
                self.loaded()
            except ConfigError as error:
                self._look_at = time.monotonic() + TOKENIZER_S
                log.warning("workers make tokens and text: %s", error)
        return self._tokenizer

    def run(self, request: Request, jobs: Sequence[GenerateJob]) -> asyncio.Task[Answer]:
        """Run a request that is new, whoever waits for it."""

        async def work() -> Answer:
            return _answer(
                await self.core.run(request.tenant, named(request, jobs), self._keep(request), request.owner)
            )

        return self._mine(request, work())

    async def cancel(self, request: Request) -> None:
        """End a request, whoever runs it, and forget its answer."""
        if request.state == "running":
            member = await self.core.member(request.tenant)
            await member.core.broker.cancel(request.job_ids, "cancelled by its client")
        await self.requests.drop(request)

    async def delivered(self, call: Call) -> None:
        """The client has its answer. If it gave its request no key, it cannot ask for the answer again."""
        if call.key is None and call.request is not None and not await call.http.is_disconnected():
            await self.requests.drop(call.request)

    async def _wait(self, call: Call, jobs: Sequence[GenerateJob], request: Request) -> Answer:
        """The answer to a request, whoever runs it."""
        while True:
            if request.answer is not None:
                return request.answer
            try:
                if request.state == "new":
                    return await asyncio.shield(self.run(request, jobs))
                answer = await self.requests.wait(request, WAIT_S)
            except Refused:
                if request.owner not in self.core.gone:
                    raise
                request = replace(request, state="running")  # whoever inherits from this gateway goes on
            except RequestLost:  # its gateway died before the pool had its jobs
                request = await self.begin(call, jobs)
            else:
                if answer is not None:
                    return answer

    def _mine(self, request: Request, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Have `work` run a request. If it ends without an answer, the request is as if it had never been made."""

        async def guarded() -> T:
            try:
                return await work
            except BaseException:
                if request.owner not in self.core.gone:
                    await asyncio.shield(self.requests.drop(request))
                raise
            finally:
                self._running.pop(request.id, None)

        task = self._running[request.id] = asyncio.create_task(guarded())
        task.add_done_callback(_seen)
        return task

    def _keep(self, request: Request) -> Keep:
        async def keep(groups: list[Group]) -> None:
            answer = _answer(groups)
            if not isinstance(answer, JobFailure):
                await self._record(request, results_of(answer))
            await self.requests.finish(request, answer)

        return keep

    async def _record(self, request: Request, results: Results) -> None:
        """Add the samples of a session's request to the session. Raises TurnRefused."""
        for place, samples in enumerate(results):
            for sample in samples:
                if sample.session_id is not None:
                    key = f"{request.seed}.{place}.{sample.sample}"
                    await self.sessions.record(request.tenant, sample.session_id, key, sample)


def _seen(task: asyncio.Task[Any]) -> None:
    """Whoever waits for the task has its error; if nobody does any more, it is not worth a line in the log."""
    if not task.cancelled():
        task.exception()


def named(request: Request, jobs: Sequence[GenerateJob]) -> list[GenerateJob]:
    """The jobs under the ids that every gateway gives them."""
    pairs = zip(request.job_ids, jobs, strict=True)
    return [job.model_copy(update={"id": job_id, "group_id": request.id}) for job_id, job in pairs]


def _answer(groups: Sequence[Group]) -> Answer:
    failures = [failure for group in groups for failure in group.failures]
    return failures[0] if failures else [list(group.results) for group in groups]


def results_of(answer: Answer) -> Results:
    """The results in an answer. Raises JobFailed."""
    if isinstance(answer, JobFailure):
        raise JobFailed(answer)
    return cast(Results, answer)


async def _deltas(answer: Answer) -> AsyncGenerator[Delta]:
    """What a stream would have given of jobs that have ended: a delta for each sample."""
    for sample in (sample for samples in results_of(answer) for sample in samples):
        yield Watched(sample.job_id, sample.sample).finish(sample)
