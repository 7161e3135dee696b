"""The same client for plain training loops: RolloutClient on an event loop in a thread, every call waited for."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from ..messages.broker import Caps, PoolLoad
from ..messages.errors import RolloutMQError
from ..messages.model import GenerateJob, RolloutResult, SamplingParams, WorkerStatus
from .calls import BlockingSession, BlockingTaskCalls, Delta, Prompt
from .client import RolloutClient
from .inbox import Group, JobHandle, Outcome

T = TypeVar("T")


class BlockingRolloutClient(BlockingTaskCalls):
    """RolloutClient without asyncio; arguments, guarantees and errors are the same, method by method.

    May be used from several threads; `close` ends the calls that wait in the others with a RolloutMQError. An iterator
    that is left early is closed when it is garbage collected or by `close`; what it had not handed out stays with the
    client.
    """

    def __init__(
        self,
        redis_url: str | None = None,
        pool: str = "default",
        *,
        client_id: str | None = None,
        max_outstanding: int = 1 << 18,
        caps: Caps | None = None,
    ) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rolloutmq-client", daemon=True)
        self._thread.start()
        self._closed = False
        self._closing = threading.Lock()
        # Nothing is handed to the loop after its last task. Reentrant: garbage collection closes iterators anywhere.
        self._gate = threading.RLock()

        async def build() -> RolloutClient:
            client = RolloutClient(redis_url, pool, client_id=client_id, max_outstanding=max_outstanding, caps=caps)
            try:
                return await client.open()
            except BaseException:
                await client.aclose()
                raise

        try:
            self._client = self._run(build())
        except BaseException:
            self._stop()
            raise

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        with self._gate:
            if self._closed:
                work.close()
                raise RolloutMQError(f"client {self.client_id} is closed")
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except concurrent.futures.CancelledError:  # by `_stop`
            raise RolloutMQError(f"client {self.client_id} is closed") from None
        except BaseException:
            future.cancel()  # Ctrl-C while waiting: the wait ends in the loop, too
            raise

    def _stop(self) -> None:
        """End what still runs in the loop, and the loop: nobody waits for ever for a task of a loop that is gone."""

        async def end_tasks() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._loop.shutdown_asyncgens()

        with self._gate:
            self._closed = True
            ending = asyncio.run_coroutine_threadsafe(end_tasks(), self._loop)
        try:
            ending.result()
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def close(self) -> None:
        """Acknowledge what was taken and disconnect; jobs under way are not cancelled. Safe to call twice."""
        with self._closing:
            if not self._closed:
                try:
                    self._run(self._client.aclose())
                finally:
                    self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def client_id(self) -> str:
        """Name of the reply stream."""
        return self._client.client_id

    @property
    def outstanding(self) -> int:
        """Jobs not fully handed out yet."""
        return self._client.outstanding

    @property
    def repeats(self) -> int:
        """See RolloutClient.repeats."""
        return self._client.repeats

    def submit(self, job: GenerateJob | None = None, /, *, timeout: float | None = 0.0, **fields: Any) -> JobHandle:
        """See RolloutClient.submit."""
        return self._run(self._client.submit(job, timeout=timeout, **fields))

    def submit_many(self, jobs: Iterable[GenerateJob], *, timeout: float | None = 0.0) -> list[JobHandle]:
        """See RolloutClient.submit_many."""
        return self._run(self._client.submit_many(jobs, timeout=timeout))

    def cancel(self, jobs: Sequence[JobHandle | str]) -> list[str]:
        """See RolloutClient.cancel."""
        return self._run(self._client.cancel(jobs))

    def stop(self, jobs: Sequence[JobHandle | str], timeout: float = 30.0) -> int:
        """See RolloutClient.stop."""
        return self._run(self._client.stop(jobs, timeout))

    def cancel_group(self, group_id: str) -> int:
        """See RolloutClient.cancel_group."""
        return self._run(self._client.cancel_group(group_id))

    def cancel_all(self) -> int:
        """See RolloutClient.cancel_all."""
        return self._run(self._client.cancel_all())

    def wait(self, job: JobHandle, timeout: float | None = None) -> list[RolloutResult]:
        """See RolloutClient.wait."""
        return self._run(self._client.wait(job, timeout))

    def results(self, timeout: float | None = None) -> Iterator[Outcome]:
        """See RolloutClient.results."""
        return self._iterate(self._client.results(timeout))

    def groups(self, timeout: float | None = None) -> Iterator[Group]:
        """See RolloutClient.groups."""
        return self._iterate(self._client.groups(timeout))

    def map(
        self, jobs: Iterable[GenerateJob], *, window: int = 1024, timeout: float | None = None
    ) -> Iterator[Outcome]:
        """See RolloutClient.map. `jobs` is iterated in the client's thread."""
        return self._iterate(self._client.map(jobs, window=window, timeout=timeout))

    def stream(
        self, job: GenerateJob | JobHandle | None = None, /, *, timeout: float | None = None, **fields: Any
    ) -> Iterator[Delta]:
        """See RolloutClient.stream."""
        return self._iterate(self._client.stream(job, timeout=timeout, **fields))

    def generate(
        self,
        prompts: Iterable[Prompt],
        sampling: SamplingParams | None = None,
        n: int = 1,
        *,
        timeout: float | None = None,
        **fields: Any,
    ) -> list[Group]:
        """See RolloutClient.generate."""
        return self._run(self._client.generate(prompts, sampling, n, timeout=timeout, **fields))

    def session(self, **fields: Any) -> BlockingSession:
        """See RolloutClient.session; arguments are the same."""
        return BlockingSession(self._client.session(**fields), self._run, self._iterate)

    def load(self) -> PoolLoad:
        """See RolloutClient.load."""
        return self._run(self._client.load())

    def workers(self) -> list[WorkerStatus]:
        """See RolloutClient.workers."""
        return self._run(self._client.workers())

    def _iterate(self, source: AsyncIterator[T]) -> Iterator[T]:
        async def step() -> tuple[T, ...]:
            try:
                return (await anext(source),)
            except StopAsyncIteration:  # cannot pass through a future
                return ()

        async def leave() -> None:
            await source.aclose()  # type: ignore[attr-defined]

        try:
            while item := self._run(step()):
                yield item[0]
        finally:
            if threading.current_thread() is self._thread:  # garbage collection runs anywhere: do not wait for oneself
                asyncio.run_coroutine_threadsafe(leave(), self._loop)
            else:
                with contextlib.suppress(RolloutMQError):  # closed: the source is, too
                    self._run(leave())
