"""The clients for plain loops: RolloutClient, Session and PoolControl on an event loop in a thread.

`waits`, `iterates` and `same` make a blocking method of an asyncio one: arguments, their types and what the call means
are said once, there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Self, Unpack

import numpy as np
import numpy.typing as npt

from ..messages.broker import Caps
from ..messages.journal import Journal
from ..messages.model import GenerateJob, JobFields, RolloutResult, TurnFields
from .calls import Session
from .client import MAX_OUTSTANDING, RolloutClient
from .control import PoolControl
from .inbox import Handle
from .loop_thread import Blocking, BlockingContext, LoopThread, calls, iterates, reads, same, waits
from .training import Books, GroupRules, RolloutFeed, Staleness


@dataclass(frozen=True, slots=True)
class BlockingJobHandle(Handle):
    """A submitted job of a BlockingRolloutClient."""

    _client: BlockingRolloutClient = field(repr=False, compare=False, kw_only=True)

    def result(self, timeout: float | None = None) -> list[RolloutResult]:
        """All `n` results, by sample number: see JobHandle.result."""
        return self._client.wait(self, timeout)


class BlockingRolloutClient(BlockingContext[RolloutClient]):
    """RolloutClient without asyncio; arguments, guarantees and errors are the same, method by method.

    Connects when it is made; raises RedisUnavailable. May be used from several threads; `close` ends the calls that
    wait in the others with a RolloutMQError. An iterator that is left early is closed when it is garbage collected or
    by `close`; what it had not handed out stays with the client. The client's own thread calls `before_ack`, and
    iterates over the jobs of `map`. What they raise, SystemExit included, is raised by the call that waits for them. If
    they call this client, which would wait for itself, they get a RolloutMQError.
    """

    def __init__(
        self,
        redis_url: str | None = None,
        pool: str = "default",
        *,
        client_id: str | None = None,
        max_outstanding: int = MAX_OUTSTANDING,
        caps: Caps | None = None,
        before_ack: Callable[[bool], bool] | None = None,
        journal: Journal | Path | str | None = None,
    ) -> None:
        self._thread = LoopThread("the client")

        async def build() -> RolloutClient:
            client = RolloutClient(
                redis_url,
                pool,
                client_id=client_id,
                max_outstanding=max_outstanding,
                caps=caps,
                before_ack=before_ack,
                journal=journal,
            )
            try:
                return await client.open()
            except BaseException:
                await client.aclose()
                raise

        self._begin(build())
        self._thread.name = f"client {self.client_id}"

    def open(self) -> Self:
        """Connect; it is connected already. Raises RolloutMQError if it is closed."""
        self._thread.run(self._it.open())
        return self

    def close(self) -> None:
        """Acknowledge what was taken and disconnect; jobs under way are not cancelled. Safe to call twice."""
        self._thread.close(self._it.aclose)

    client_id: str = reads(RolloutClient.client_id)
    closed: bool = reads(RolloutClient.closed)
    outstanding: int = reads(RolloutClient.outstanding)
    repeats: int = reads(RolloutClient.repeats)
    journal: Journal | None = reads(RolloutClient.journal)

    def submit(
        self, job: GenerateJob | None = None, /, *, timeout: float | None = 0.0, **fields: Unpack[JobFields]
    ) -> BlockingJobHandle:
        """See RolloutClient.submit."""
        return self._handle(self._thread.run(self._it.submit(job, timeout=timeout, **fields)))

    def submit_many(
        self, jobs: Iterable[GenerateJob], *, timeout: float | None = 0.0, progress: bool | str = False
    ) -> list[BlockingJobHandle]:
        """See RolloutClient.submit_many."""
        work = self._it.submit_many(jobs, timeout=timeout, progress=progress)
        return [self._handle(job) for job in self._thread.run(work)]

    def _handle(self, job: Handle) -> BlockingJobHandle:
        return BlockingJobHandle(*(getattr(job, one.name) for one in fields(Handle)), _client=self)

    def session(
        self,
        *,
        session_id: str | None = None,
        system: str | None = None,
        token_ids: Sequence[int] | npt.NDArray[Any] | None = None,
        chat: bool = False,
        **fields: Unpack[TurnFields],
    ) -> BlockingSession:
        """See RolloutClient.session."""
        made = self._it.session(session_id=session_id, system=system, token_ids=token_ids, chat=chat, **fields)
        return BlockingSession._of(made, self._thread)

    def feed(
        self,
        staleness: Staleness,
        rules: GroupRules = GroupRules(),  # noqa: B008
        *,
        version: int = 0,
        reproducible: bool = False,
    ) -> BlockingRolloutFeed:
        """See RolloutClient.feed."""
        return BlockingRolloutFeed._of(
            self._it.feed(staleness, rules, version=version, reproducible=reproducible), self._thread
        )

    @cached_property
    def control(self) -> BlockingPoolControl:
        """See RolloutClient.control."""
        return BlockingPoolControl._of(self._it.control, self._thread)

    check = waits(RolloutClient.check)
    cancel = waits(RolloutClient.cancel)
    cancel_all = waits(RolloutClient.cancel_all)
    cancel_group = waits(RolloutClient.cancel_group)
    stop = waits(RolloutClient.stop)
    wait = waits(RolloutClient.wait)
    ending = waits(RolloutClient.ending)
    results = iterates(RolloutClient.results)
    groups = iterates(RolloutClient.groups)
    map = iterates(RolloutClient.map)
    generate = waits(RolloutClient.generate)
    stream = iterates(RolloutClient.stream)
    episodes = iterates(RolloutClient.episodes)
    sessions = iterates(RolloutClient.sessions)
    take_session = waits(RolloutClient.take_session)
    forget_session = waits(RolloutClient.forget_session)
    embed = waits(RolloutClient.embed)
    score = waits(RolloutClient.score)
    reward = waits(RolloutClient.reward)
    load = waits(RolloutClient.load)
    workers = waits(RolloutClient.workers)


class BlockingRolloutFeed(Blocking[RolloutFeed]):
    """Made by `BlockingRolloutClient.feed`; method by method what RolloutFeed is. The client's own thread iterates over
    the jobs of `batches`, and calls the functions of `GroupRules`."""

    submit = waits(RolloutFeed.submit)
    take = waits(RolloutFeed.take)
    batch = waits(RolloutFeed.batch)
    batches = iterates(RolloutFeed.batches)
    train = calls(RolloutFeed.train)
    drop = calls(RolloutFeed.drop)
    advance = calls(RolloutFeed.advance)
    renumber = calls(RolloutFeed.renumber)
    sampled = calls(RolloutFeed.sampled)
    state_dict = calls(RolloutFeed.state_dict)
    load_state_dict = calls(RolloutFeed.load_state_dict)
    saved = calls(RolloutFeed.saved)
    report = calls(RolloutFeed.report)
    capacity: int = reads(RolloutFeed.capacity)

    @property
    def books(self) -> Books:
        """What became of each sample. To be read only: another thread writes them."""
        return self._it.books

    @property
    def staleness(self) -> Staleness:
        """As it was declared."""
        return self._it.staleness

    @property
    def rules(self) -> GroupRules:
        """What makes a group."""
        return self._it.rules


class BlockingSession(BlockingContext[Session]):
    """Made by `BlockingRolloutClient.session`; method by method what Session is."""

    generate = waits(Session.generate)
    stream = iterates(Session.stream)
    give = same(Session.give)
    replace = same(Session.replace)
    close = waits(Session.close)

    def branch(self, at: int | None = None) -> BlockingSession:
        """See Session.branch."""
        return BlockingSession._of(self._it.branch(at), self._thread)

    def __len__(self) -> int:
        return len(self._it)

    @property
    def session_id(self) -> str:
        """Its name in results."""
        return self._it.session_id

    @property
    def worker(self) -> str | None:
        """The worker that has the history in its cache, as far as is known."""
        return self._it.worker

    token_ids: npt.NDArray[np.int32] = reads(Session.token_ids)
    mask: npt.NDArray[np.uint8] = reads(Session.mask)
    logprobs: npt.NDArray[np.float32] = reads(Session.logprobs)
    versions: npt.NDArray[np.int64] = reads(Session.versions)


class BlockingPoolControl(BlockingContext[PoolControl]):
    """PoolControl without asyncio; arguments, answers and errors are the same, method by method.

    May be used from several threads. Use it in `with`, or close it. `BlockingRolloutClient.control` is one over the
    client's connection.
    """

    def __init__(self, redis_url: str | None = None, pool: str = "default") -> None:
        self._thread = LoopThread("the control")

        async def build() -> PoolControl:
            return PoolControl(redis_url, pool)

        self._begin(build())

    def open(self) -> Self:
        """Connect. Raises RedisUnavailable. `with` does it too."""
        self._thread.run(self._it.open())
        return self

    def __enter__(self) -> Self:
        try:
            return self.open()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Disconnect, if the connection is its own. Safe to call twice."""
        if self._it._own is not None:
            self._thread.close(self._it.aclose)

    send = waits(PoolControl.send)
    pause = waits(PoolControl.pause)
    resume = waits(PoolControl.resume)
    abort = waits(PoolControl.abort)
    stop = waits(PoolControl.stop)
    sleep = waits(PoolControl.sleep)
    wake = waits(PoolControl.wake)
    flush_cache = waits(PoolControl.flush_cache)
    clear_storage = waits(PoolControl.clear_storage)
    version = waits(PoolControl.version)
    versions = waits(PoolControl.versions)
    set_version = waits(PoolControl.set_version)
    audit = waits(PoolControl.audit)
    parameter = waits(PoolControl.parameter)
    save = waits(PoolControl.save)
    load = waits(PoolControl.load)
    adapters = waits(PoolControl.adapters)
    load_adapter = waits(PoolControl.load_adapter)
    unload_adapter = waits(PoolControl.unload_adapter)
    start_profile = waits(PoolControl.start_profile)
    stop_profile = waits(PoolControl.stop_profile)
    journal = waits(PoolControl.journal)
