"""What the commands of one worker act on. Each command is a function of it, of its parameters and of its deadline."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ...messages.model import WorkerState
from ...sync.transfer import Ledger
from ..engine import Engine
from ..engine_state import EngineState
from ..generation import Generation
from ..journaling import WorkerJournal
from ..lease import ClaimLoop, Handback, Outbox
from ..weights import WeightFollower


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """ledger: of its pool. drain(seconds): leaves the pool within so many seconds. state_name(): the worker's state, as
    in its status."""

    engine: Engine
    generation: Generation
    follower: WeightFollower
    ledger: Ledger
    claims: ClaimLoop
    handback: Handback
    outbox: Outbox
    journal: WorkerJournal
    drain: Callable[[float | None], None]
    state_name: Callable[[], WorkerState]

    @property
    def state(self) -> EngineState:
        return self.generation.state


Handler = Callable[[WorkerParts, Any, float], Awaitable[Mapping[str, Any]]]
"""Takes the checked parameters and the deadline on time.monotonic, and returns plain data."""
