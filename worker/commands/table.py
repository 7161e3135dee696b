"""Every command of a worker in one table, and what it says about itself."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from ...messages.model import NoParams, StopParams
from . import adapters, files, pause, weights
from .parts import Handler, WorkerParts
from .queue import own_version


async def version(on: WorkerParts, params: NoParams, deadline: float) -> Mapping[str, Any]:
    info = on.engine.info
    return {
        **pause.told(on),
        "version": on.generation.version,
        "state": on.state_name(),
        "in_service": on.state.in_service,
        "updating": on.state.updating,
        "quarantined": on.state.quarantined,
        "holds": on.state.weights.reasons,
        "adapters": info.adapters.current(),
        "engine": f"{info.name} {info.version}",
        "model": info.model,
        "running": on.generation.running,
        "slots": on.generation.slots.limit,
        "rolloutmq": own_version(),
    }


async def stop(on: WorkerParts, params: StopParams, deadline: float) -> Mapping[str, Any]:
    on.drain(params.drain_s)
    return {"running": on.generation.running}


HANDLERS: Mapping[str, Handler] = {
    "version": version,
    "stop": stop,
    "pause": pause.pause,
    "resume": pause.resume,
    "abort": pause.abort,
    "sleep": pause.sleep,
    "wake": pause.wake,
    "flush_cache": partial(pause.empty, "flush_cache"),
    "clear_storage": partial(pause.empty, "clear_storage"),
    "set_version": weights.set_version,
    "audit": weights.audit,
    "parameter": weights.parameter,
    "save": weights.save,
    "load": weights.load,
    "adapters": adapters.adapters,
    "load_adapter": adapters.load_adapter,
    "unload_adapter": adapters.unload_adapter,
    "start_profile": files.start_profile,
    "stop_profile": files.stop_profile,
    "journal": files.switch_journal,
}
