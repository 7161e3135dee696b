"""Commands that decide whether a worker serves: pause and resume, abort, sleep and wake, and emptying caches."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...messages.errors import EngineError, RequestRefused
from ...messages.model import AbortParams, MemoryTag, NoParams, PauseParams, SleepParams, WakeParams
from ..weights import folder_order
from .parts import WorkerParts

log = logging.getLogger(__name__)
LIFT_S = 2.0


def told(on: WorkerParts) -> dict[str, Any]:
    """What a command's answer says about the pause and the sleep."""
    sleep = on.state.sleep
    return {"paused": on.state.paused or "", "asleep": sorted(sleep.asleep), "stale": sleep.stale}


async def lift(on: WorkerParts) -> None:
    """Thaw a frozen engine before a drain, so that what runs can end."""
    if on.state.frozen.holds:
        with suppress(EngineError, TimeoutError):
            async with asyncio.timeout(LIFT_S):
                await _thaw(on)


# --- pausing ---------------------------------------------------------------------------------------------------


async def pause(on: WorkerParts, params: PauseParams, deadline: float) -> Mapping[str, Any]:
    mode = params.mode
    if mode == "in_place":
        _can_freeze(on)
    elif on.state.frozen.holds:
        await _thaw(on)
    on.state.paused = mode
    on.claims.poke()
    if mode == "finish":
        on.state.pause.release()
        return told(on)
    on.state.pause.acquire()
    if mode == "in_place":
        await _freeze(on, deadline)
        return told(on) | {"running": on.generation.running}
    await _interrupt(on)
    if mode == "retract":
        async with on.state.turn.take("pause retract", deadline):
            await on.engine.operate("flush_cache", {})
    if mode == "abort":
        return told(on) | {"ended": await _end(on, deadline)}
    if params.hand_back:
        await _hand_back(on, deadline)
    return told(on)


async def resume(on: WorkerParts, params: NoParams, deadline: float) -> Mapping[str, Any]:
    if on.state.frozen.holds:
        await _thaw(on)
    on.state.paused = None
    on.state.pause.release()
    on.claims.poke()
    return told(on)


async def abort(on: WorkerParts, params: AbortParams, deadline: float) -> Mapping[str, Any]:
    if on.state.frozen.holds:
        raise RequestRefused("abort: the engine is paused in place, and answers nothing: resume it first")
    running = on.generation.running
    if params.drop:
        return {"running": running, "cancelled": await on.handback.cancel_all("aborted by an operator")}
    await _interrupt(on)
    return {"running": running, "cancelled": 0}


def _can_freeze(on: WorkerParts) -> None:
    if not on.state.sleep.may_run:
        raise RequestRefused(f"pause in_place: nothing runs in an engine that is asleep: {told(on)}")


async def _freeze(on: WorkerParts, deadline: float) -> None:
    if on.state.frozen.holds:
        return
    try:
        async with on.state.turn.take("pause in_place", deadline):
            _can_freeze(on)
            on.state.frozen.acquire()
            await on.engine.operate("freeze", {})
            on.state.paused = "in_place"  # an engine that was restarted meanwhile has made it another mode
    except BaseException:
        on.state.paused = None
        on.state.frozen.release()
        on.state.pause.release()
        on.claims.poke()
        raise


async def _thaw(on: WorkerParts) -> None:
    await on.engine.operate("thaw", {})
    on.state.frozen.release()


async def _interrupt(on: WorkerParts) -> None:
    """All that runs stops and waits here. Raises EngineDead, and has the engine restarted, if it does not stop.

    During an update of the weights this waits until legs can end again.
    """
    async with on.generation.in_flight.quiet():
        pass


async def _end(on: WorkerParts, deadline: float) -> int:
    """End all jobs with what they have, also those just being claimed, and publish that. Returns their number."""
    await _published(on, deadline)
    jobs = await on.handback.stop_all()
    on.generation.end(sample for held in jobs for sample in held.samples.values())
    await _published(on, deadline)
    return len(jobs)


async def _published(on: WorkerParts, deadline: float) -> None:
    """Wait until claimed jobs are admitted, and finished samples published."""
    with suppress(TimeoutError):
        async with asyncio.timeout(max(0.001, deadline - time.monotonic())):
            await on.claims.settled()
            await on.outbox.flushed()


async def _hand_back(on: WorkerParts, deadline: float) -> None:
    """Hand back all jobs, also those just being claimed, after the finished samples have been published."""
    await _published(on, deadline)
    await on.handback.release_all(on.outbox.jobs())


# --- caches ----------------------------------------------------------------------------------------------------


async def empty(what: str, on: WorkerParts, params: NoParams, deadline: float) -> Mapping[str, Any]:
    """what: the operation of the engine that empties a cache."""
    _not_frozen(on, what)
    async with on.state.turn.take(what, deadline):
        _not_frozen(on, what)
        if on.state.sleep.asleep:
            raise RequestRefused(f"{what}: the engine is asleep: {told(on)}")
        async with on.generation.in_flight.quiet():
            return await on.engine.operate(what, {})


def _not_frozen(on: WorkerParts, what: str) -> None:
    if on.state.frozen.holds:
        raise RequestRefused(f"{what}: the engine is paused in place with its requests' KV: resume it first")


# --- memory ----------------------------------------------------------------------------------------------------


async def sleep(on: WorkerParts, params: SleepParams, deadline: float) -> Mapping[str, Any]:
    _not_frozen(on, "sleep")
    await on.engine.operate("sleep", {"tags": ()})  # whether it can at all, before anything is interrupted
    async with on.state.turn.take("sleep", deadline):
        _not_frozen(on, "sleep")
        if tags := on.state.sleep.to_sleep(params.tags):
            await _give_up(on, tags)
    on.claims.poke()
    if params.hand_back:
        await _hand_back(on, deadline)
    return told(on)


async def _give_up(on: WorkerParts, tags: Sequence[MemoryTag]) -> None:
    on.state.asleep.acquire()
    try:
        await _interrupt(on)
        await on.engine.operate("sleep", {"tags": tags})
    except BaseException:
        if not on.state.sleep.asleep:
            on.state.asleep.release()
        raise
    on.state.sleep = on.state.sleep.sleep(tags)
    if not on.state.sleep.takes_weights:
        on.state.weights_asleep.acquire()


async def wake(on: WorkerParts, params: WakeParams, deadline: float) -> Mapping[str, Any]:
    on.state.sleep.to_wake(params.tags)
    async with on.state.turn.take("wake", deadline):
        tags, version = on.state.sleep.to_wake(params.tags), on.generation.version
        if not tags:
            return told(on) | {"intact": True, "version": version}
        answer = await on.engine.operate("wake", {"tags": tags})
        intact = bool(answer.get("intact", True))
        on.state.sleep = on.state.sleep.wake(tags, intact=intact)
        if "weights" in tags:
            if not intact:
                on.state.broken(patient=True)
            on.state.weights_asleep.release()
    if "weights" in tags and not intact and version == 0:
        await _restore(on)
    if not on.state.sleep.asleep:
        on.state.asleep.release()
    on.claims.poke()
    return told(on) | {"intact": intact, "version": on.generation.version}


async def _restore(on: WorkerParts) -> None:
    """Load the model as it was at the start. (A version that came from a trainer comes from there again.)"""
    model = Path(on.engine.info.model)
    nbytes = await asyncio.to_thread(lambda: sum(file.stat().st_size for file in model.glob("*.safetensors")))
    if not nbytes:
        log.warning("woken weights are no version, and %s has none to read: the engine will be restarted", model)
        on.state.broken()
        return
    report = await on.follower.load(folder_order(str(model), 0, nbytes))
    if report.ok:
        on.state.doubted()
    elif on.state.quarantined:  # else a trainer's version was faster
        log.error("woken weights could not be read from %s: %s: %s", model, report.phase, report.error)
        on.state.broken()
