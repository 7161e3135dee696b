"""Which memory an engine has given up, and what may be done next: a state machine without an engine.

The three kinds of memory are those of SGLang's memory saver. Each rule below follows from what SGLang 0.5.17 and
0.5.23 do:

- to give up memory twice, or to take it twice, ends SGLang's scheduler;
- a request needs all three, so the engine serves only when nothing is asleep;
- weights wake before the KV cache does: they are what a trainer sends to next, and the transfer needs room that the KV
  cache would have taken;
- woken weights are whatever was in that memory, unless the engine keeps a copy: nothing may be sampled with them until
  they are known to be a whole version.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..messages.errors import RequestRefused
from ..messages.model import MEMORY_TAGS, MemoryTag


@dataclass(frozen=True, slots=True)
class SleepState:
    """asleep: memory that is given up. stale: the weights have been given up, and are no version since.

    Methods give the state after; they raise RequestRefused, with the reason, for what is not legal in this one. What
    sleeps already, or is awake already, is left out: a command that comes again changes nothing.
    """

    asleep: frozenset[MemoryTag] = frozenset()
    stale: bool = False

    @property
    def may_run(self) -> bool:
        """Whether requests may run."""
        return not self.asleep and not self.stale

    @property
    def takes_weights(self) -> bool:
        """Whether there is memory to load a version into."""
        return "weights" not in self.asleep

    def to_sleep(self, tags: Sequence[MemoryTag]) -> tuple[MemoryTag, ...]:
        """What `sleep(tags)` gives up, in the order in which it is done."""
        return tuple(tag for tag in MEMORY_TAGS if tag in (tags or MEMORY_TAGS) and tag not in self.asleep)

    def to_wake(self, tags: Sequence[MemoryTag]) -> tuple[MemoryTag, ...]:
        """What `wake(tags)` takes again, in the order in which it is done."""
        chosen = tuple(tag for tag in MEMORY_TAGS if tag in (tags or MEMORY_TAGS) and tag in self.asleep)
        if "kv_cache" in chosen and "weights" in self.asleep and "weights" not in chosen:
            raise RequestRefused(
                "wake kv_cache: the weights are asleep, and come first (or in the same command): "
                "a version is loaded before the KV cache takes the memory that its transfer needs"
            )
        return chosen

    def sleep(self, tags: Sequence[MemoryTag]) -> SleepState:
        """After `tags` (all that is awake, if there are none) have been given up."""
        return replace(self, asleep=self.asleep | set(self.to_sleep(tags)))

    def wake(self, tags: Sequence[MemoryTag], *, intact: bool) -> SleepState:
        """After `tags` (all that is asleep, if there are none) are there again.

        intact: whether the weights, if they are among them, are bit for bit what they were. Weights that were no
        version when they went to sleep are none afterwards either.
        """
        chosen = self.to_wake(tags)
        stale = self.stale or ("weights" in chosen and not intact)
        return SleepState(self.asleep - set(chosen), stale)

    def synced(self) -> SleepState:
        """After a whole version has been loaded."""
        if not self.takes_weights:
            raise RequestRefused("a version cannot be loaded while the weights are asleep")
        return replace(self, stale=False)
