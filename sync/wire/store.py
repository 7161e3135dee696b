"""The rendezvous store: the trainer's TCPStore, through which the ranks of a cell meet.

torch's client waits for ever if the server accepts connections and does not answer, as a stopped process does. Its
timeouts are for keys, not for answers. So `BoundedStore` makes its calls in a thread that it can leave behind.
"""

from __future__ import annotations

import atexit
import ipaddress
import socket
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar
from urllib.parse import urlsplit

from torch.distributed import TCPStore

from ...messages.errors import RedisUnavailable, TransferTimeout, WeightSyncError
from ..transfer import SENDER_GONE

T = TypeVar("T")
ANSWER_S = 3.0
"""A server that is silent for so many seconds counts as gone: its thread does nothing else and answers at once."""
EXIT_S = 2.0
"""Most seconds for which the end of the process waits for calls that were left behind."""


def within(seconds: float, work: Callable[[], T]) -> T:
    """Return or raise what `work` does. Raises TimeoutError after `seconds`; `work` then goes on alone."""
    return _answer(begin(work), seconds)


def _answer(future: Future[T], seconds: float) -> T:
    try:
        return future.result(max(0.0, seconds))
    except TimeoutError:
        if future.done():  # it is the work's own
            return future.result()
        raise TimeoutError(f"no answer within {seconds:.1f} s") from None


def begin(work: Callable[[], T]) -> Future[T]:
    """Run `work` in a thread of its own that nobody has to wait for."""
    future: Future[T] = Future()
    Thread(target=_run, args=(work, future), name="rolloutmq-store", daemon=True).start()
    return future


_under_way: set[Future[Any]] = set()


def _run(work: Callable[[], T], future: Future[T]) -> None:
    _under_way.add(future)
    try:
        result = work()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
    finally:
        _under_way.discard(future)


def _let_end() -> None:
    # A call of torch that comes back while the interpreter is being taken down ends the whole process with SIGABRT.
    wait(list(_under_way), EXIT_S)


atexit.register(_let_end)


class BoundedStore:
    """Calls of a TCPStore, each of which raises RuntimeError if the server does not answer."""

    def __init__(self, raw: Any) -> None:
        self.raw = raw
        """The TCPStore itself, for torch's groups. Its calls are not bounded."""
        self._silent = False
        self._turns: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        # One thread for all calls, because starting one takes longer than most calls. It ends with the store.
        Thread(target=_serve, args=(self._turns,), name="rolloutmq-store", daemon=True).start()
        weakref.finalize(self, self._turns.put, None)

    def set(self, key: str, value: str) -> None:
        self._call(partial(self.raw.set, key, value))

    def get(self, key: str) -> bytes:
        """Return the value of a key that exists."""
        return bytes(self._call(partial(self.raw.get, key)))

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys exist."""
        return bool(self._call(partial(self.raw.check, list(keys))))

    def delete_key(self, key: str) -> bool:
        return bool(self._call(partial(self.raw.delete_key, key)))

    def _call(self, work: Callable[[], Any]) -> Any:
        if self._silent:
            raise RuntimeError("it has not answered before")
        future: Future[Any] = Future()
        self._turns.put((work, future))
        try:
            return _answer(future, ANSWER_S)
        except TimeoutError as error:
            self._silent = not future.done()
            raise RuntimeError(str(error)) from None


def _serve(turns: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]) -> None:
    while (turn := turns.get()) is not None:
        _run(*turn)
        del turn


SLICE_S = 0.5
"""Seconds between looks, in a wait for another process, whether the wait still makes sense."""

FIRST_ATTEMPT_S = 1.0


def own_address_towards(url: str) -> str:
    """Return this host's IP address as the server at `url` (a Redis URL) sees it.

    Workers that reach the same Redis can usually reach the trainer under this address. Where they cannot, set `host`.
    The address is "127.0.0.1" for a Redis on this host or on a unix socket. Raises RedisUnavailable if the host is
    unknown or no route leads to it.
    """
    parts = urlsplit(url)
    if not parts.hostname or parts.scheme == "unix":
        return "127.0.0.1"
    port = parts.port or 6379
    try:
        family, kind, proto, _, address = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.connect(address)  # a datagram socket: this looks up the route and sends nothing
            own: str = probe.getsockname()[0]
    except OSError as error:
        raise RedisUnavailable(f"no way to {parts.hostname}:{port}: {error}") from error
    return "127.0.0.1" if ipaddress.ip_address(own).is_loopback else own


def local_end(host: str) -> str:
    """Return this host's address on the route to `host`."""
    return own_address_towards(f"tcp://[{host}]:1" if ":" in host else f"tcp://{host}:1")


def serve_store(host: str) -> Any:
    """Start the trainer's rendezvous store on a free port, `store.port`. Raises WeightSyncError if it cannot listen."""
    try:
        return TCPStore(
            host, 0, is_master=True, wait_for_workers=False, multi_tenant=True, timeout=timedelta(seconds=30)
        )
    except (RuntimeError, OSError) as error:  # torch's DistNetworkError is a RuntimeError
        raise WeightSyncError(f"no rendezvous store can listen on {host}: {error}") from error


def never() -> str:
    """Say that a transfer is not broken off."""
    return ""


def join_store(host: str, port: int, timeout_s: float, broken: Callable[[], str] = never) -> BoundedStore:
    """Connect to a sender's store. Raises TransferTimeout if it does not answer in time, or if `broken`."""
    # Now and then torch's server never answers a connection, and answers the next one at once. So there are several
    # attempts. Each lasts twice as long as the one before, because torch prints a stack for every failed one.
    deadline, attempt_s, why = time.monotonic() + timeout_s, FIRST_ATTEMPT_S, ""
    while not why:
        left = deadline - time.monotonic()
        if left <= 0.0:
            why = f"no answer within {timeout_s:.1f} s"
            break
        timeout = timedelta(seconds=max(0.1, min(attempt_s, left)))
        connect = partial(TCPStore, host, port, is_master=False, wait_for_workers=False, timeout=timeout)
        try:
            return BoundedStore(_result(begin(connect), min(deadline, time.monotonic() + attempt_s), broken))
        except (RuntimeError, OSError):  # also TimeoutError: a stopped process has an open port and does not answer
            attempt_s *= 2.0
            why = broken()
    raise TransferTimeout(f"no rendezvous store at {host}:{port}: {why}")


def _result(connecting: Future[Any], until: float, broken: Callable[[], str]) -> Any:
    """Wait for the result. Raises TimeoutError at `until` (time.monotonic), or as soon as `broken` gives a reason."""
    while True:
        try:
            return connecting.result(max(0.0, min(SLICE_S, until - time.monotonic())))
        except TimeoutError:
            if time.monotonic() >= until or broken():
                raise TimeoutError from None


def broadcast_key(number: str, what: str) -> str:
    """Return the key in the store of one broadcast in a cell.

    what: "broken": why the sender has given it up. It exists only then.
        "go": set by the sender when every rank is ready. From then on receivers may overwrite the weights that they
        have. "ready/<rank>": set by that rank when it has its buffers and waits for the first bucket.
    """
    return f"broadcast-{number}/{what}"


def await_key(store: Any, key: str, deadline: float, broken: Callable[[], str], what: str) -> None:
    """Wait until a key is set. Raises TransferTimeout at `deadline` (time.monotonic), or if `broken`."""
    pause, look = 0.00005, time.monotonic() + SLICE_S
    try:
        while not store.check([key]):  # a wait inside the store could not be ended
            now = time.monotonic()
            if now >= deadline:
                raise TransferTimeout(f"no {what} in time")
            if now >= look:
                look = now + SLICE_S
                if why := broken():
                    raise TransferTimeout(f"no {what}: {why}")
            time.sleep(pause)
            pause = min(pause * 1.02, 0.02)
    except RuntimeError as error:
        raise TransferTimeout(f"no {what}: {SENDER_GONE}: {error}") from error


def why_broken(store: Any, number: str) -> Callable[[], str]:
    """Return a function that says why the sender has given a broadcast up, or is gone; "" if neither."""
    key = broadcast_key(number, "broken")

    def ask() -> str:
        try:
            return store.get(key).decode(errors="replace") if store.check([key]) else ""
        except RuntimeError as error:
            return f"{SENDER_GONE}: {error}"

    return ask
