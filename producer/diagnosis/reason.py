"""Why jobs of a pool do not run: one reason, and how it is told."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal, get_args

Cause = Literal[
    "redis-away",
    "shard-away",
    "redis-memory",
    "redis-refuses",
    "pool-full",
    "client-full",
    "weights-lost",
    "restart-loop",
    "no-worker",
    "starting",
    "engine-down",
    "quarantined",
    "draining",
    "asleep",
    "stale-weights",
    "paused",
    "behind",
    "task",
    "needs",
    "context",
    "adapter",
    "version-ahead",
    "exact-version",
    "staleness",
    "suspect",
    "unclaimed",
    "preferred",
    "slow",
]
CAUSES: tuple[Cause, ...] = get_args(Cause)
"""Every cause, that which explains most first. docs/troubleshooting.md says of each what to do."""
NO_FAULT: frozenset[Cause] = frozenset({"slow", "preferred", "starting"})
"""Of these, those that end by themselves."""


@dataclass(frozen=True, slots=True)
class Reason:
    """Why jobs do not run, or would not.

    found: what is there, with numbers and names. do: what to do about it. since: Unix seconds, None if nobody knows.
    stops: whether jobs are there that wait because of it. Without any it is a fault that nobody has met yet.
    """

    cause: Cause
    found: str
    do: str
    since: float | None = None
    stops: bool = True

    def told(self, now: float | None = None) -> str:
        """In one line. now: Unix seconds, by default this host's clock."""
        at = time.time() if now is None else now
        lasting = f", for {at - self.since:.0f} s" if self.since is not None and at - self.since >= 1 else ""
        return f"{self.cause}: {self.found}{lasting}. {self.do}"
