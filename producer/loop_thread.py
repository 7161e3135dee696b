"""What makes blocking classes of asyncio ones: an event loop in a thread, and methods that wait for it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import functools
import inspect
import logging
import os
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar

from ..messages.errors import RolloutMQError, WrongProcess
from .inbox import Crossing, under_way

log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")
LOOK_S = 1.0
"""A thread that waits looks so often whether the loop's thread still lives."""


class LoopThread:
    """An event loop in a thread. `name`: of whose loop it is, in errors."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="rolloutmq", daemon=True)
        self._over = self.closed = False
        self._thread.start()
        self._pid = os.getpid()
        self._closing = threading.Lock()
        # Nothing is handed to the loop after its last task. Reentrant: garbage collection closes iterators anywhere.
        self._gate = threading.RLock()
        self._here = threading.local()  # leaving: what this thread has left and what has not ended

    def _serve(self) -> None:
        """Run the loop until `_stop`. SystemExit and KeyboardInterrupt leave the loop when a task raises them. Whoever
        waits for that task gets them, and the loop goes on."""
        while not self._over:
            with contextlib.suppress(BaseException):
                self.loop.run_forever()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the loop and wait for it; what it raises is raised as it is.

        Ctrl-C ends the wait, and the work. Outcomes that the work had taken by then are given back. Raises
        RolloutMQError if the loop is closed or gets closed, and in the loop's own thread, which cannot wait for itself;
        WrongProcess in a forked child.
        """
        try:
            self._check_thread()
        except RolloutMQError:
            work.close()
            raise
        crossing, context, ended = Crossing(), contextvars.copy_context(), threading.Event()
        context.run(under_way.set, crossing)
        tasks: list[asyncio.Task[T]] = []

        def begin() -> None:
            tasks.append(self.loop.create_task(work))
            tasks[0].add_done_callback(lambda _: ended.set())

        def lose() -> None:
            if tasks:
                tasks[0].cancel()
            else:  # it was not handed over
                work.close()
            crossing.lose()

        try:
            # What this thread has left ends first: a session has one turn at a time.
            concurrent.futures.wait(self._leaving())
            with self._gate:
                if self.closed:
                    work.close()
                    raise self._closed()
                self.loop.call_soon_threadsafe(begin, context=context)
            while not ended.wait(LOOK_S):
                if not self._thread.is_alive():
                    raise self._closed()
            (task,) = tasks
            if task.cancelled() and self.closed:
                raise self._closed()
            found = task.result()
            crossing.received = True
            return found
        except BaseException as error:
            if ended.is_set() and not tasks[0].cancelled() and tasks[0].exception() is error:
                crossing.received = True  # the error tells of what was taken
            else:  # Ctrl-C
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    self.loop.call_soon_threadsafe(lose)
            raise

    def _check_thread(self) -> None:
        """Raises WrongProcess in a forked child, and RolloutMQError in the loop's own thread."""
        if os.getpid() != self._pid:
            raise WrongProcess(self.name, self._pid)
        if threading.current_thread() is self._thread:
            raise RolloutMQError(
                f"{self.name} was called by a function that its own thread runs: the call would wait for itself. "
                "Use another client there"
            )

    def _closed(self) -> RolloutMQError:
        return RolloutMQError(f"{self.name} is closed")

    def leave(self, source: AsyncIterator[Any]) -> None:
        """Have an asynchronous iterator closed, before the next work of this thread begins. Waits for nothing: garbage
        collection calls this in any thread."""

        async def leave() -> None:
            try:
                await source.aclose()  # type: ignore[attr-defined]
            except Exception:
                log.exception("%s: an iterator that was left did not end in good order", self.name)

        if os.getpid() != self._pid:
            return
        with self._gate:
            if not self.closed:  # otherwise the source is, too
                leaving = asyncio.run_coroutine_threadsafe(leave(), self.loop)
                self._here.leaving = [*self._leaving(), leaving]

    def _leaving(self) -> list[concurrent.futures.Future[None]]:
        return [it for it in getattr(self._here, "leaving", ()) if not it.done()]

    def close(self, last: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        """Run `last`, end the loop and its thread. Safe to call twice, and in a forked child, which has neither."""
        if os.getpid() != self._pid:
            return
        self._check_thread()
        with self._closing:
            if not self.closed:
                try:
                    if last is not None:
                        self.run(last())
                finally:
                    self._stop()

    def _stop(self) -> None:
        """End what still runs in the loop, and the loop: nobody waits for ever for a task of a loop that is gone."""

        async def end_tasks() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.loop.shutdown_asyncgens()

        with self._gate:
            self.closed = True
            ending = asyncio.run_coroutine_threadsafe(end_tasks(), self.loop)
        try:
            ending.result()
        finally:
            self._over = True
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()
            self.loop.close()


class Items(Iterator[T]):
    """The items of an asynchronous iterator, which is closed when this one is. A wait for an item that Ctrl-C ends has
    taken nothing; the next one goes on, unless the source is a generator, which has ended."""

    def __init__(self, thread: LoopThread, source: AsyncIterator[T]) -> None:
        self._thread, self._source = thread, source
        self._over = False

    def __next__(self) -> T:
        if self._over:
            raise StopIteration
        if hasattr(self._source, "asked"):
            self._source.asked = True
        item = self._thread.run(self._step())
        if item:
            return item[0]
        self._over = True
        raise StopIteration

    async def _step(self) -> tuple[T, ...]:
        try:
            return (await anext(self._source),)
        except StopAsyncIteration:  # cannot pass through a future
            return ()

    def close(self) -> None:
        """End it. Safe to call twice."""
        if not self._over:
            self._over = True
            with contextlib.suppress(RolloutMQError):  # the client is closed: the source is, too
                self._thread.run(self._end())

    async def _end(self) -> None:
        await self._source.aclose()  # type: ignore[attr-defined]

    def __del__(self) -> None:
        if not self._over:
            self._over = True
            self._thread.leave(self._source)


A = TypeVar("A")


class Blocking(Generic[A]):
    """Has the asyncio object `_it`, whose methods run in `_thread`."""

    _it: A
    _thread: LoopThread

    @classmethod
    def _of(cls, it: A, thread: LoopThread) -> Self:
        """For an object that belongs to a client, and lives in its loop."""
        made = cls.__new__(cls)
        made._it, made._thread = it, thread
        return made

    def _begin(self, making: Coroutine[Any, Any, A]) -> None:
        """Have the object made in the thread's loop. If that fails, the thread ends."""
        try:
            self._it = self._thread.run(making)
        except BaseException:
            self._thread.close()
            raise


class BlockingContext(Blocking[A]):
    """One that is closed, also by the end of a `with` block."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        raise NotImplementedError


def waits(method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[Any, P], T]:
    """The same method, waited for."""

    def call(it: Blocking[Any], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return it._thread.run(method(it._it, *args, **kwargs))

    return _like(method, call)


def iterates(method: Callable[Concatenate[Any, P], AsyncIterator[T]]) -> Callable[Concatenate[Any, P], Iterator[T]]:
    """The same method, as a plain iterator. One that is left early is closed when it is garbage collected."""

    def call(it: Blocking[Any], /, *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        return Items(it._thread, method(it._it, *args, **kwargs))

    return _like(method, call)


def calls(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """The same method, called in the loop: it changes what only the loop may change."""

    async def work(it: Any, args: Any, kwargs: Any) -> T:
        return method(it, *args, **kwargs)

    def call(it: Blocking[Any], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return it._thread.run(work(it._it, args, kwargs))

    return _like(method, call)


def same(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """The same method, which waits for nothing."""

    def call(it: Blocking[Any], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return method(it._it, *args, **kwargs)

    return _like(method, call)


def reads(told: Any) -> Any:
    """The same property."""
    return property(lambda it: told.fget(it._it), doc=told.__doc__)


F = TypeVar("F", bound=Callable[..., Any])


def _like(method: Callable[..., Any], call: F) -> F:
    """`call` with the name, the documentation and the signature of `method`, as a blocking method has it."""
    functools.update_wrapper(call, method)
    del call.__wrapped__  # type: ignore[attr-defined]
    shown = inspect.signature(method)
    returned = (
        str(shown.return_annotation).replace("AsyncIterator[", "Iterator[").replace("AsyncGenerator[", "Iterator[")
    )
    call.__signature__ = shown.replace(return_annotation=returned)  # type: ignore[attr-defined]
    call.__annotations__["return"] = returned
    return call
