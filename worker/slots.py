"""What may start: samples wait here until nobody holds the gate and the engine has a slot for them."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import deque
from collections.abc import Callable

from ..messages.errors import EngineError
from .gate import Gate
from .jobs import Run

log = logging.getLogger(__name__)
RETRIES_S = (0.5, 1.0, 2.0)
"""A sample that failed for want of memory is tried again this often, each time after so many seconds."""
GROW_S = 30.0
"""After so long without another such failure an eighth of the full number of slots is added again."""
_MEMORY = re.compile(
    r"out of memory|outofmemory|can't allocate memory|cannot allocate memory|bad_alloc|no available memory"
    r"|not enough memory|kv cache pool is full|memory pressure|memoryerror",
    re.IGNORECASE,
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an engine's error says that the memory of a GPU, the host or the KV cache was not enough."""
    return _MEMORY.search(f"{type(error).__name__}: {error}") is not None


class Slots:
    """Samples that wait, and how many may run at once: `limit`, which is `most` unless memory is short.

    start(sample): starts the sample's next leg and returns its task; None if it may not run here.
    gate: while anybody holds it, nothing starts.
    retried: how often a sample was tried again.
    """

    def __init__(self, most: int, start: Callable[[Run], asyncio.Task[None] | None]) -> None:
        self.most = self.limit = most
        self.retried = 0
        self.waiting: deque[Run] = deque()
        self.gate = Gate(self.fill)
        self._start = start
        self._taken: set[asyncio.Task[None]] = set()
        self._recovery = self.gate.holder("memory")
        self._changed = 0.0

    def fill(self) -> None:
        """Start what may start; no other place does. Call it after each change of gate, limit, queue and legs."""
        moving: list[Run] = []
        while self.waiting and self.gate.is_open and len(self._taken) < self.limit:
            sample = self.waiting.popleft()
            if sample.moving and not sample.dropped:
                moving.append(sample)
            elif not sample.dropped and (task := self._start(sample)) is not None:
                self._taken.add(task)
                task.add_done_callback(self._free)
        self.waiting.extendleft(reversed(moving))

    def _free(self, task: asyncio.Task[None]) -> None:
        self._taken.discard(task)
        self.fill()

    def relieve(self) -> None:
        """Use half as many slots from now on: the engine ran out of memory."""
        self.limit = max(1, self.limit // 2)
        self._changed = time.monotonic()

    def grow(self) -> None:
        """Use a few more slots if the last change was long ago. Call it now and then."""
        if self.limit < self.most and time.monotonic() - self._changed > GROW_S:
            self.limit = min(self.most, self.limit + max(1, self.most // 8))
            self._changed = time.monotonic()
        self.fill()

    def try_again(self, sample: Run, error: EngineError) -> bool:
        """Queue a sample that failed for want of memory again. It starts after a pause, beside half as many others.

        False if the error is another one, or after too many tries.
        """
        if sample.retries >= len(RETRIES_S) or not is_out_of_memory(error):
            return False
        sample.retries += 1
        self.retried += 1
        self.waiting.appendleft(sample)
        if not self._recovery.holds:  # all that ran together may say the same
            self.relieve()
            self._recovery.acquire()
            asyncio.get_running_loop().call_later(RETRIES_S[sample.retries - 1], self._recovery.release)
            log.warning("out of memory, %d samples at once from now on: %s", self.limit, error)
        return True
