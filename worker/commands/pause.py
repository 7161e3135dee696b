"""Commands that decide whether a worker serves: pause and resume, abort, sleep and wake, and emptying caches."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...messages.errors import EngineError, RequestRefused
from ...messages.model import AbortParams, MemoryTag, NoParams, PauseParams, SleepParams, WakeParams
from ..engine import Engine
from ..generation import Generation
from ..lease import ClaimLoop, Handback, Outbox
from ..weights import WeightFollower, folder_order
from .queue import Handler

log = logging.getLogger(__name__)
LIFT_S = 2.0


class Service:
    """Whether one worker serves, and the commands that change it.

    poke(): is called when the worker may claim jobs now, or may not any more. Set `follower` and `claims` before the
    first command.
    """

    claims: ClaimLoop
    follower: WeightFollower

    def __init__(
        self,
        engine: Engine,
        generation: Generation,
        handback: Handback,
        outbox: Outbox,
        *,
        poke: Callable[[], None],
    ) -> None:
        self._state = generation.state
        self._engine, self._generation = engine, generation
        self._handback, self._outbox, self._poke = handback, outbox, poke

    def handlers(self) -> dict[str, Handler]:
        """Each action and the function that does it."""
        return {
            "pause": self._pause,
            "resume": self._resume,
            "abort": self._abort,
            "sleep": self._go_to_sleep,
            "wake": self._wake,
            "flush_cache": self._flush_cache,
            "clear_storage": self._clear_storage,
        }

    def told(self) -> dict[str, Any]:
        """What a command's answer says about the pause and the sleep."""
        sleep = self._state.sleep
        return {"paused": self._state.paused or "", "asleep": sorted(sleep.asleep), "stale": sleep.stale}

    async def lift(self) -> None:
        """Thaw a frozen engine before a drain, so that what runs can end."""
        if self._state.frozen.holds:
            with suppress(EngineError, TimeoutError):
                async with asyncio.timeout(LIFT_S):
                    await self._thaw()

    # --- pausing ---------------------------------------------------------------------------------------------------

    async def _pause(self, params: PauseParams, deadline: float) -> Mapping[str, Any]:
        mode = params.mode
        if mode == "in_place":
            self._can_freeze()
        elif self._state.frozen.holds:
            await self._thaw()
        self._state.paused = mode
        self._poke()
        if mode == "finish":
            self._state.pause.release()
            return self.told()
        self._state.pause.acquire()
        if mode == "in_place":
            await self._freeze(deadline)
            return self.told() | {"running": self._generation.running}
        await self._interrupt()
        if mode == "retract":
            async with self._state.turn.take("pause retract", deadline):
                await self._engine.operate("flush_cache", {})
        if params.hand_back:
            await self._hand_back(deadline)
        return self.told()

    async def _resume(self, params: NoParams, deadline: float) -> Mapping[str, Any]:
        if self._state.frozen.holds:
            await self._thaw()
        self._state.paused = None
        self._state.pause.release()
        self._poke()
        return self.told()

    async def _abort(self, params: AbortParams, deadline: float) -> Mapping[str, Any]:
        if self._state.frozen.holds:
            raise RequestRefused("abort: the engine is paused in place, and answers nothing: resume it first")
        running = self._generation.running
        if params.drop:
            return {"running": running, "cancelled": await self._handback.cancel_all("aborted by an operator")}
        await self._interrupt()
        return {"running": running, "cancelled": 0}

    def _can_freeze(self) -> None:
        if not self._state.sleep.serves:
            raise RequestRefused(f"pause in_place: nothing runs in an engine that is asleep: {self.told()}")

    async def _freeze(self, deadline: float) -> None:
        if self._state.frozen.holds:
            return
        try:
            async with self._state.turn.take("pause in_place", deadline):
                self._can_freeze()
                self._state.frozen.acquire()
                await self._engine.operate("freeze", {})
                self._state.paused = "in_place"  # an engine that was restarted meanwhile has made it another mode
        except BaseException:
            self._state.paused = None
            self._state.frozen.release()
            self._state.pause.release()
            self._poke()
            raise

    async def _thaw(self) -> None:
        await self._engine.operate("thaw", {})
        self._state.frozen.release()

    async def _interrupt(self) -> None:
        """All that runs stops and waits here. Raises EngineDead, and has the engine restarted, if it does not stop.

        During an update of the weights this waits until legs can end again.
        """
        async with self._generation.in_flight.quiet():
            pass

    async def _hand_back(self, deadline: float) -> None:
        """Hand back all jobs, also those just being claimed, after the finished samples have been published."""
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.001, deadline - time.monotonic())):
                await self.claims.settled()
                await self._outbox.flushed()
        await self._handback.release_all(self._outbox.jobs())

    # --- caches ----------------------------------------------------------------------------------------------------

    async def _flush_cache(self, params: NoParams, deadline: float) -> Mapping[str, Any]:
        return await self._empty("flush_cache", deadline)

    async def _clear_storage(self, params: NoParams, deadline: float) -> Mapping[str, Any]:
        return await self._empty("clear_storage", deadline)

    async def _empty(self, what: str, deadline: float) -> Mapping[str, Any]:
        self._not_frozen(what)
        async with self._state.turn.take(what, deadline):
            self._not_frozen(what)
            if self._state.sleep.asleep:
                raise RequestRefused(f"{what}: the engine is asleep: {self.told()}")
            async with self._generation.in_flight.quiet():
                return await self._engine.operate(what, {})

    def _not_frozen(self, what: str) -> None:
        if self._state.frozen.holds:
            raise RequestRefused(f"{what}: the engine is paused in place with its requests' KV: resume it first")

    # --- memory ----------------------------------------------------------------------------------------------------

    async def _go_to_sleep(self, params: SleepParams, deadline: float) -> Mapping[str, Any]:
        self._not_frozen("sleep")
        await self._engine.operate("sleep", {"tags": ()})  # whether it can at all, before anything is interrupted
        async with self._state.turn.take("sleep", deadline):
            self._not_frozen("sleep")
            if tags := self._state.sleep.to_sleep(params.tags):
                await self._give_up(tags)
        self._poke()
        if params.hand_back:
            await self._hand_back(deadline)
        return self.told()

    async def _give_up(self, tags: Sequence[MemoryTag]) -> None:
        self._state.asleep.acquire()
        try:
            await self._interrupt()
            await self._engine.operate("sleep", {"tags": tags})
        except BaseException:
            if not self._state.sleep.asleep:
                self._state.asleep.release()
            raise
        self._state.sleep = self._state.sleep.sleep(tags)
        if not self._state.sleep.takes_weights:
            self._state.weights_asleep.acquire()

    async def _wake(self, params: WakeParams, deadline: float) -> Mapping[str, Any]:
        self._state.sleep.to_wake(params.tags)
        async with self._state.turn.take("wake", deadline):
            tags, version = self._state.sleep.to_wake(params.tags), self._generation.version
            if not tags:
                return self.told() | {"intact": True, "version": version}
            answer = await self._engine.operate("wake", {"tags": tags})
            intact = bool(answer.get("intact", True))
            self._state.sleep = self._state.sleep.wake(tags, intact=intact)
            if "weights" in tags:
                if not intact:
                    self._state.broken(patient=True)
                self._state.weights_asleep.release()
        if "weights" in tags and not intact and version == 0:
            await self._restore()
        if not self._state.sleep.asleep:
            self._state.asleep.release()
        self._poke()
        return self.told() | {"intact": intact, "version": self._generation.version}

    async def _restore(self) -> None:
        """Load the model as it was at the start. (A version that came from a trainer comes from there again.)"""
        model = Path(self._engine.info.model)
        nbytes = await asyncio.to_thread(lambda: sum(file.stat().st_size for file in model.glob("*.safetensors")))
        if not nbytes:
            log.warning("woken weights are no version, and %s has none to read: the engine will be restarted", model)
            self._state.broken()
            return
        report = await self.follower.load(folder_order(str(model), 0, nbytes))
        if report.ok:
            self._state.doubted()
        elif self._state.quarantined:  # else a trainer's version was faster
            log.error("woken weights could not be read from %s: %s: %s", model, report.phase, report.error)
            self._state.broken()
