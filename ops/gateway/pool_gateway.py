"""One pool behind a gateway: what doors ask for becomes jobs, with what keys and sessions of requests promise."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from redis.exceptions import RedisError

from ...messages.broker import RecordedSessions, broker_of
from ...messages.errors import ConfigError, RolloutMQError, TurnRefused
from ...messages.model import EmbedJob, GenerateJob, JobFailure
from ...messages.redis import connect, insist, ping
from ...producer.calls import Delta, Watched
from ...producer.data import Texts
from ...producer.inbox import Group
from ..http import Refused
from .answers import Answer, Results, results_of
from .call import Call, ClientGone
from .core import Core, Keep
from .facts import PoolFacts
from .heir import Gateways
from .pauses import FRESH_S, Pauses
from .quotas import Quotas
from .requests import Request, RequestLost, Requests
from .settings import Settings
from .versions import VersionNotReady
from .weights import Weights

log = logging.getLogger(__name__)
WAIT_S = 5.0
ORPHANED_LOOKS = 20
"""An answer without a key that stays for two seconds was not delivered: its gateway died, or nobody listened."""
TOKENIZER_S = 60.0
"""A tokenizer that could not be loaded is looked for again after so many seconds."""
LOADING_S = 10.0
T = TypeVar("T")
J = TypeVar("J", GenerateJob, EmbedJob)


class PoolGateway:
    """What one gateway process does in one pool. quotas: those of the gateway, whatever the pool."""

    def __init__(self, settings: Settings, pool: str, quotas: Quotas) -> None:
        first = pool == settings.pools[0]
        self.settings, self.pool, self.quotas = settings, pool, quotas
        self._redis = connect(settings.redis, pool=pool)
        self.broker = broker_of(self._redis, pool)
        self.facts = PoolFacts(self.broker, settings.name if first else "")
        self.texts = Texts(settings.tokenizer if first else None)
        self.requests = Requests(self._redis, pool, record=self._record)
        self.pauses = Pauses(self._redis, pool)
        self.weights = Weights(settings, pool, self.facts)
        self.sessions = RecordedSessions(self.broker)
        self.core = Core(settings.redis, pool, self._join)
        self._gateways = Gateways(settings.redis, self.requests, renamed=self.core.close)
        self._running: dict[str, asyncio.Task[Any]] = {}  # by the seeds of requests, while this gateway runs them
        self.loaded: Callable[[], None] = lambda: None
        """Called when the tokenizer is there, the last of what stays."""
        self._dropping: set[asyncio.Task[None]] = set()
        self._tokenizer: Any = None
        self._loading: asyncio.Task[None] | None = None
        self._look_at = self._wait_until = 0.0

    async def _join(self, tenant: str) -> str:
        return await self._gateways.join(tenant)

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """It works inside the block. Raises RedisUnavailable."""
        await ping(self._redis)
        beating, warming = asyncio.create_task(self._gateways.run()), asyncio.create_task(self.tokenizer())
        warming.add_done_callback(_seen)  # the first request would wait for it
        try:
            yield
        finally:
            beating.cancel()
            warming.cancel()
            await self.weights.close()
            await self.core.close()
            await self._gateways.leave()
            await self._redis.aclose()

    async def results(self, call: Call, jobs: Sequence[GenerateJob]) -> Results:
        """The results of a call that was begun. Raises JobFailed, ClientGone, and what refuses jobs."""
        if call.request is None:
            work = self._charged(call, self.core.run(call.tenant.name, jobs))
            return results_of(_answer(await call.unless_gone(work)))
        try:
            return results_of(await call.unless_gone(self._wait(call, jobs)))
        except (ClientGone, VersionNotReady):
            if call.key is None and (task := self._running.get(call.request.seed)) is not None:
                task.cancel()
            raise

    async def stream(self, call: Call, jobs: Sequence[GenerateJob]) -> AsyncGenerator[Delta]:
        """The tokens of a call that was begun. Raises as `results` does, at once or while they come.

        What another gateway generates comes as a whole. Closing the generator before its end is hanging up.
        """
        tenant, request = call.tenant.name, call.request
        if request is not None and request.state != "new":
            return _deltas(await call.unless_gone(self._wait(call, jobs)))
        try:
            if request is None:
                stream = await self.core.stream(tenant, jobs)
            else:
                stream = await self.core.stream(tenant, named(request, jobs), self._keep(request), request.owner)
        except BaseException:
            call.settle(0)
            if request is not None:
                self._drop(request)
            raise
        call.leave = partial(stream.leave, stay=call.key is not None)
        task = self._mine(request, self._charged(call, stream.task))
        return _until(stream.deltas(stay=call.key is not None), task)

    async def begin(self, call: Call, jobs: Sequence[GenerateJob], *, only_new: bool = False) -> None:
        """Admit a call, and find or begin its request if it has a key or a session. Its tenant may have paused.

        only_new: what others call by the same implicit key is theirs. Raises KeyReused, TurnRefused, PoolBusy, Refused.
        """
        tenant = call.tenant.name
        if await self.pauses.paused(tenant, FRESH_S):
            await call.unless_gone(self.pauses.over(tenant))
        if call.session is not None and await self.sessions.taken(tenant, call.session):
            raise TurnRefused(f"session {call.session!r} was taken, and takes no further turns", "taken")
        if not call.kept:
            call.admission = await self.quotas.admit(call.tenant, call.most)
            return
        call.request = request = await self.requests.begin(
            tenant,
            call.key or call.digest.hex(),
            call.digest,
            (await self.core.member(tenant)).core.client_id,
            prompts=[job.token_ids for job in jobs],
            only_new=only_new or (call.key is None and not call.repeat),
            about=call.about if call.key is not None else b"",
        )
        if request.state == "new":  # whoever asks for an answer that there is pays nothing
            try:
                call.admission = await self.quotas.admit(call.tenant, call.most)
            except BaseException:
                self._drop(request)
                raise

    def job(self, call: Call, job: J) -> J:
        """A job of a call, with what its tenant has and what every request here has."""
        more: dict[str, Any] = {} if job.deadline_s is not None else {"deadline_s": self.settings.deadline_s}
        if call.tenant.priority is not None:
            more["priority"] = call.tenant.priority
        return job.model_copy(update=more) if more else job

    async def tokenizer(self) -> Any:
        """The model's; None if this host has none, so that workers make tokens and text.

        In a gateway's first seconds requests wait for it; a busy host may take a minute to import what loads it.
        """
        if self._tokenizer is None:
            now = time.monotonic()
            if (self._loading is None or self._loading.done()) and now >= self._look_at:
                self._wait_until = self._wait_until or now + LOADING_S
                self._loading = asyncio.create_task(self._load())
                self._loading.add_done_callback(_seen)
            if self._loading is not None and not self._look_at and now < self._wait_until:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(asyncio.shield(self._loading), self._wait_until - now)
        return self._tokenizer

    async def _load(self) -> None:
        if self.texts.model is None and not self.texts.given:
            self.texts.model = (await self.facts.model()).path or None
        try:
            self._tokenizer = await asyncio.to_thread(self.texts.load)
            self.loaded()
        except ConfigError as error:
            log.warning("workers make tokens and text: %s", error)
        self._look_at = time.monotonic() + TOKENIZER_S

    def run(self, call: Call, jobs: Sequence[GenerateJob]) -> asyncio.Task[list[Group]]:
        """Run a request that is new, whoever waits for it."""
        request = call.request
        assert request is not None
        work = self.core.run(request.tenant, named(request, jobs), self._keep(request), request.owner)
        return self._mine(request, self._charged(call, work))

    async def _charged(self, call: Call, work: Awaitable[list[Group]]) -> list[Group]:
        """What `work` returns. The call costs what that has, nothing if it was refused, the most if it was cut off."""
        used = None
        try:
            groups = await work
            used = sum(it.token_ids.size for group in groups for it in group.results)
            used += sum(group.prompt_ids.size for group in groups if group.prompt_ids is not None)
            return groups
        except RolloutMQError:
            used = 0
            raise
        finally:
            call.settle(used)

    async def cancel(self, request: Request) -> None:
        """End a request, whoever runs it: that is its answer then. One that has an answer is forgotten."""
        if request.state != "running":
            await self.requests.drop(request)
            return
        told = JobFailure(job_id=request.job_ids[0], outcome="cancelled", cause="cancelled by its client")
        with contextlib.suppress(RequestLost):
            await self.requests.finish(request, told)
        await (await self.core.member(request.tenant)).core.broker.cancel(request.job_ids, told.cause)

    async def delivered(self, call: Call) -> None:
        """The client has its answer. If it gave its request no key, it cannot ask for the answer again."""
        if call.key is None and call.request is not None:
            with contextlib.suppress(RedisError, OSError):  # it is forgotten in ten minutes anyway
                await self.requests.drop(call.request)

    async def _wait(self, call: Call, jobs: Sequence[GenerateJob]) -> Answer:
        """The answer to a request, whoever runs it."""
        answer = call.request.answer if call.request is not None else None
        while (request := call.request) is not None:
            if answer is not None and (call.key is not None or await self._orphaned(request)):
                return answer
            try:
                if answer is not None:  # it was for the client that asked first
                    raise RequestLost(request.id)
                if request.state == "new":
                    return _answer(await asyncio.shield(self.run(call, jobs)))
                answer = await self.requests.wait(request, WAIT_S)
            except Refused:
                if request.owner not in self.core.gone:
                    raise
                call.request = replace(request, state="running")  # whoever inherits from this gateway goes on
            except RequestLost:  # its gateway died before the pool had its jobs, or somebody else has its answer
                await self.begin(call, jobs, only_new=call.key is None)
                answer = request.answer if (request := call.request) is not None else None
        raise AssertionError("only a call with a request waits for it")

    async def _orphaned(self, request: Request) -> bool:
        """Whether nobody had the answer to a request without a key: then it stays, for the client that repeats."""
        for _ in range(ORPHANED_LOOKS):
            await asyncio.sleep(0.1)
            found = await self.requests.look(request.tenant, request.id)
            if found is None or found.seed != request.seed:
                return False
        return True

    def _mine(self, request: Request | None, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Have `work` run a request. If it ends without an answer, the request is as if it had never been made."""

        async def guarded() -> T:
            try:
                return await work
            except BaseException:
                if request is not None and request.owner not in self.core.gone and self.requests.unfinished(request):
                    self._drop(request)
                raise

        name, task = request.seed if request is not None else secrets.token_hex(8), asyncio.create_task(guarded())
        self._running[name] = task
        task.add_done_callback(lambda _: self._running.pop(name, None))
        task.add_done_callback(_seen)
        return task

    def _drop(self, request: Request) -> None:
        drop = insist(partial(self.requests.drop, request), over=lambda: request.owner in self.core.gone)
        self._dropping.add(task := asyncio.create_task(drop))
        task.add_done_callback(self._dropping.discard)
        task.add_done_callback(_seen)

    def _keep(self, request: Request) -> Keep:
        async def keep(groups: list[Group]) -> None:
            await self.requests.finish(request, _answer(groups))

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


async def _until(deltas: AsyncGenerator[Delta], task: asyncio.Task[Any]) -> AsyncGenerator[Delta]:
    """The deltas; they end when `task` has."""
    async with contextlib.aclosing(deltas):
        async for delta in deltas:
            yield delta
    await asyncio.wait({task})


async def _deltas(answer: Answer) -> AsyncGenerator[Delta]:
    """What a stream would have given of jobs that have ended: a delta for each sample."""
    for sample in (sample for samples in results_of(answer) for sample in samples):
        yield Watched(sample.job_id, sample.sample).finish(sample)
