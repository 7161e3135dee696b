"""Another process's rendezvous store, from here: every call comes back.

torch's client waits for ever for a server that is there and does not answer, as one of a stopped process is: its
timeouts are for keys, not for answers. So calls are made in a thread, which is left behind if need be.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

T = TypeVar("T")
ANSWER_S = 3.0
"""The server is a thread that does nothing else and answers at once: who is silent for that long is gone."""


def within(seconds: float, work: Callable[[], T]) -> T:
    """What `work` returns or raises; TimeoutError if it takes longer. Then it goes on alone."""
    future = begin(work)
    try:
        return future.result(max(0.0, seconds))
    except FutureTimeout:
        if future.done():
            return future.result()
        raise TimeoutError(f"no answer within {seconds:.1f} s") from None


def begin(work: Callable[[], T]) -> Future[T]:
    """`work`, in a thread of its own that nobody has to wait for."""
    future: Future[T] = Future()
    Thread(target=_run, args=(work, future), name="rolloutmq-store", daemon=True).start()
    return future


def _run(work: Callable[[], T], future: Future[T]) -> None:
    try:
        result = work()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)


class BoundedStore:
    """The calls of a TCPStore that a transfer needs. Each raises RuntimeError if the server does not answer."""

    def __init__(self, raw: Any) -> None:
        self.raw = raw
        """The store itself, for torch to build groups with; its own calls are not bounded."""
        self._silent = False
        self._turns: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        # One for all calls, and not one each: starting a thread takes longer than most calls. It ends with the store.
        Thread(target=_serve, args=(self._turns,), name="rolloutmq-store", daemon=True).start()
        weakref.finalize(self, self._turns.put, None)

    def set(self, key: str, value: str) -> None:
        self._call(partial(self.raw.set, key, value))

    def get(self, key: str) -> bytes:
        """The value of a key that is there."""
        return bytes(self._call(partial(self.raw.get, key)))

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all of them are there."""
        return bool(self._call(partial(self.raw.check, list(keys))))

    def delete_key(self, key: str) -> bool:
        return bool(self._call(partial(self.raw.delete_key, key)))

    def _call(self, work: Callable[[], Any]) -> Any:
        if self._silent:
            raise RuntimeError("it has not answered before")
        future: Future[Any] = Future()
        self._turns.put((work, future))
        try:
            return future.result(ANSWER_S)
        except FutureTimeout:
            if future.done():
                return future.result()
            self._silent = True
            raise RuntimeError(f"no answer within {ANSWER_S:.1f} s") from None


def _serve(turns: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]) -> None:
    while (turn := turns.get()) is not None:
        _run(*turn)
        del turn
