"""How many samples an engine is given at once: fewer after it ran out of memory, more again as time goes by."""

from __future__ import annotations

import re
import time

RETRIES_S = (0.5, 1.0, 2.0)
"""What failed for want of memory is tried again this often, each time after so many seconds."""
GROW_S = 30.0
"""So long without another failure, and an eighth of the full number is added again."""
_MEMORY = re.compile(
    r"out of memory|outofmemory|can't allocate memory|cannot allocate memory|bad_alloc|no available memory"
    r"|not enough memory|kv cache pool is full|memory pressure|memoryerror",
    re.IGNORECASE,
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an engine's error says that a GPU's, the host's or the KV cache's memory was not enough."""
    return _MEMORY.search(f"{type(error).__name__}: {error}") is not None


class Pressure:
    """The number of slots that are used, of `most`."""

    def __init__(self, most: int) -> None:
        self.most = self.slots = most
        self.times = 0
        """How often the number was halved."""
        self._changed = 0.0

    def relieve(self) -> None:
        """The engine had not enough memory for what it was given: half of it from now on."""
        self.slots = max(1, self.slots // 2)
        self.times += 1
        self._changed = time.monotonic()

    def grow(self) -> None:
        """Called now and then: a little more, if it went well for a while."""
        if self.slots < self.most and time.monotonic() - self._changed > GROW_S:
            self.slots = min(self.most, self.slots + max(1, self.most // 8))
            self._changed = time.monotonic()
