"""One worker of a scaler, and where workers may run."""

from __future__ import annotations

import asyncio
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

from ...messages.model import WorkerStatus
from .places import Place


class Member(ABC):
    """A worker that a scaler has started, or found when it began.

    name: for people. started_at: when it could begin to load, on time.monotonic; infinite while it waits for a
    machine. served_at: when it was first seen to serve; None before. leaving: it was told to drain. leave_by: when it
    has to have ended. too_late: it did not serve in time, and was killed. ended: done when it has ended.
    """

    def __init__(self, place: Place, name: str, started_at: float) -> None:
        self.place, self.name, self.started_at = place, name, started_at
        self.served_at: float | None = None
        self.leaving = False
        self.leave_by = math.inf
        self.too_late = False
        self.ended: asyncio.Future[object] = asyncio.get_running_loop().create_future()

    def drain(self, within_s: float) -> None:
        """Have it finish or hand back what it holds, and leave. Each call can only bring `leave_by` nearer."""
        self.leaving = True
        self.leave_by = min(self.leave_by, time.monotonic() + within_s)

    @property
    def failed(self) -> bool:
        """Whether its end, which nobody has asked for, is the fault of the worker or of its place."""
        return True

    @abstractmethod
    def has(self, status: WorkerStatus) -> bool:
        """Whether this is the status of this worker."""

    @abstractmethod
    def kill(self) -> None:
        """End it without a drain; others get its jobs when its lease is over."""

    @abstractmethod
    def last_lines(self) -> str:
        """The end of its output."""

    @abstractmethod
    def how_it_ended(self) -> str:
        """In words."""


class Site(Protocol):
    """Where a scaler has its workers: this host, or a cluster's queue."""

    async def start(self, place: Place, leave_s: float) -> Member:
        """A worker in a free place. leave_s: seconds in which it has to leave if this process dies. Raises OSError."""

    async def look(self, free: Sequence[Place]) -> list[Member]:
        """Bring all members up to date, and pass on what they were told. Raises OSError if that cannot be done now.

        Returns workers that an earlier scaler of this pool has left here, each in a free place.
        """
