"""Every command of a worker in one table, and what it says about itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...messages.model import Command, CommandReply, NoParams, StopParams
from ...sync.transfer import Ledger
from ..engine import Engine
from ..generation import Generation
from ..journaling import WorkerJournal
from ..weights import WeightFollower
from .adapters import AdapterCommands
from .files import JournalCommands, ProfileCommands
from .pause import Service
from .queue import Commands, Handler, own_version
from .weights import WeightCommands


def worker_commands(
    engine: Engine,
    generation: Generation,
    follower: WeightFollower,
    service: Service,
    ledger: Ledger,
    *,
    journal: WorkerJournal,
    drain: Callable[[float | None], None],
    state: Callable[[], str],
    on_done: Callable[[Command, CommandReply], None],
) -> Commands:
    """The commands of one worker.

    drain(seconds): leaves the pool within so many seconds; the command "stop" calls it. state(): the worker's state, as
    in its status. on_done(command, reply): called when a command was done, or refused.
    """

    async def version(params: NoParams, deadline: float) -> Mapping[str, Any]:
        info = engine.info
        return {
            **service.told(),
            "version": generation.version,
            "state": state(),
            "in_service": generation.state.in_service,
            "updating": generation.state.updating,
            "quarantined": generation.state.quarantined,
            "holds": generation.state.weights.reasons,
            "adapters": info.adapters.current(),
            "engine": f"{info.name} {info.version}",
            "model": info.model,
            "running": generation.running,
            "slots": generation.slots.limit,
            "rolloutmq": own_version(),
        }

    async def stop(params: StopParams, deadline: float) -> Mapping[str, Any]:
        drain(params.drain_s)
        return {"running": generation.running}

    handlers: dict[str, Handler] = {
        "version": version,
        "stop": stop,
        **service.handlers(),
        **WeightCommands(engine, generation, follower, ledger, state).handlers(),
        **AdapterCommands(engine, follower.adapters).handlers(),
        **ProfileCommands(engine).handlers(),
        **JournalCommands(journal).handlers(),
    }
    return Commands(handlers, on_done)
