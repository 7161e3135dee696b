"""Inside SGLang's scheduler process: work for the thread that runs the model, between two batches.

A request of SGLang's takes 2 to 3 ms from the worker to that thread and back, as long as a small model is on the wire.
What comes by the control channel is handed over here instead, and wakes a scheduler that sleeps. It keeps no order with
requests that are on SGLang's own way: there must be none. Nor does it reach all ranks of an engine in the same step.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

POLLIN = 1
"""zmq.POLLIN; zmq is SGLang's dependency, not this package's."""


class Errands:
    """`put` from any thread, `run` on the scheduler's."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._rung = False
        self._near, self._far = socket.socketpair()
        self._near.setblocking(False)
        self._far.setblocking(False)

    def wake(self, sleeper: Any) -> None:
        """Have SGLang's idle sleeper, None if there is none, end its sleep for an errand."""
        if sleeper is not None:
            sleeper.poller.register(self._near.fileno(), POLLIN)

    def put(self, job: Callable[[], None]) -> None:
        """Have `job`, which must not raise, done."""
        self._jobs.put(job)
        with contextlib.suppress(BlockingIOError):  # full: it is awake, or about to be
            self._far.send(b"1")
        self._rung = True  # last: a byte that came after it was seen would never be read, and nobody sleep any more

    def run(self) -> None:
        """Do what there is to do; next to nothing if there is nothing."""
        if not self._rung:
            return
        self._rung = False
        with contextlib.suppress(BlockingIOError):
            while self._near.recv(4096):
                pass
        while True:
            try:
                job = self._jobs.get_nowait()
            except Empty:
                return
            job()
