"""Whether a worker serves, by command: paused in one of four ways, or with its engine's memory given up."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from ...messages.errors import EngineError, RequestRefused
from ...messages.model import AbortParams, NoParams, PauseMode, PauseParams, SleepParams, WakeParams
from ...sync.transfer import TransferOrder
from ..engine import Engine
from ..generation import Generation
from ..lease import ClaimLoop, Handback, Outbox
from ..weights import SLOWEST, TIMEOUT_S, WeightFollower
from .queue import Handler
from .sleep import SleepState

log = logging.getLogger(__name__)
LIFT_S = 2.0
_numbers = itertools.count(-1_000_000, -1)
"""By them an engine tells one prepared version from another; neither the ledger nor from_disk.py has such ones."""


class Service:
    """One worker's.

    follower, claims: set before anything is asked of it. poke(): it may claim now, or not any more.
    """

    follower: WeightFollower
    claims: ClaimLoop

    def __init__(
        self,
        engine: Engine,
        generation: Generation,
        handback: Handback,
        outbox: Outbox,
        *,
        poke: Callable[[], None],
    ) -> None:
        self.paused: PauseMode | None = None
        self._frozen = False
        self._sleep = SleepState()
        self._engine, self._generation = engine, generation
        self._handback, self._outbox, self._poke = handback, outbox, poke

    @property
    def serves(self) -> bool:
        """Whether it may claim jobs, as far as commands are concerned."""
        return self.paused is None and self._state.serves

    @property
    def _state(self) -> SleepState:
        if self._sleep.stale and self._sleep.takes_weights and not self.follower.quarantined:
            self._sleep = self._sleep.synced()
        return self._sleep

    def handlers(self) -> dict[str, Handler]:
        """By action."""
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
        """What there is to say about it."""
        state = self._state
        return {"paused": self.paused or "", "asleep": sorted(state.asleep), "stale": state.stale}

    async def lift(self) -> None:
        """Before a drain: what runs must be able to end."""
        if self._frozen:
            with suppress(EngineError, TimeoutError):
                async with asyncio.timeout(LIFT_S):
                    await self._thaw()

    def restarted(self) -> None:
        """The engine is a new one: all there, and nothing frozen. A pause stays one."""
        if self._frozen or self._sleep.asleep:
            log.warning("the engine was restarted: it is neither frozen nor asleep any more")
        self._frozen, self._sleep = False, SleepState()
        self.follower.holds.clear()
        self._generation.open_gate("asleep")
        if self.paused == "in_place":
            self.paused = "abort"

    # --- pausing ---------------------------------------------------------------------------------------------------

    async def _pause(self, params: PauseParams, deadline: float) -> Mapping[str, Any]:
        mode = params.mode
        if mode == "in_place" and not self._state.serves:
            raise RequestRefused(f"pause in_place: nothing runs in an engine that is asleep: {self.told()}")
        if self._frozen and mode != "in_place":
            await self._thaw()
        self.paused = mode
        self._poke()
        if mode == "finish":
            self._generation.open_gate("pause")
            return self.told()
        self._generation.close_gate("pause")
        if mode == "in_place":
            await self._freeze(deadline)
            return self.told() | {"running": self._generation.running}
        await self._interrupt()
        if mode == "retract":
            async with self._alone(deadline, "pause retract"):
                await self._engine.operate("flush_cache", {})
        if params.hand_back:
            await self._hand_back(deadline)
        return self.told()

    async def _resume(self, params: NoParams, deadline: float) -> Mapping[str, Any]:
        if self._frozen:
            await self._thaw()
        self.paused = None
        self._generation.open_gate("pause")
        self._poke()
        return self.told()

    async def _abort(self, params: AbortParams, deadline: float) -> Mapping[str, Any]:
        if self._frozen:
            raise RequestRefused("abort: the engine is paused in place, and answers nothing: resume it first")
        running = self._generation.running
        if params.drop:
            return {"running": running, "cancelled": await self._handback.cancel_all("aborted by an operator")}
        await self._interrupt()
        return {"running": running, "cancelled": 0}

    async def _freeze(self, deadline: float) -> None:
        if self._frozen:
            return
        try:
            async with self._alone(deadline, "pause in_place"):
                self.follower.holds.add("frozen")
                await self._engine.operate("freeze", {})
                self._frozen = True
        except BaseException:
            self.follower.holds.discard("frozen")
            self.paused = None
            self._generation.open_gate("pause")
            self._poke()
            raise

    async def _thaw(self) -> None:
        await self._engine.operate("thaw", {})
        self._frozen = False
        self.follower.holds.discard("frozen")
        self.follower.poke()

    async def _interrupt(self) -> None:
        """All that runs stops and waits here. Raises EngineDead, and has the engine restarted, if it does not."""
        async with self._generation.quiet():
            pass

    async def _hand_back(self, deadline: float) -> None:
        """All that is held, and what is just being claimed; finished samples first, their jobs have others."""
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.001, deadline - time.monotonic())):
                await self.claims.settled()
                await self._outbox.flushed()
        await self._handback.release_all(self._outbox.jobs())

    @asynccontextmanager
    async def _alone(self, deadline: float, what: str) -> AsyncIterator[None]:
        """No update of the weights is under way inside."""
        try:
            async with asyncio.timeout(max(0.001, deadline - time.monotonic())):
                await self.follower.turn.acquire()
        except TimeoutError:
            raise EngineError(f"{what}: an update of the weights is under way, and did not end in time") from None
        try:
            yield
        finally:
            self.follower.turn.release()

    # --- caches ----------------------------------------------------------------------------------------------------

    async def _flush_cache(self, params: NoParams, deadline: float) -> Mapping[str, Any]:
        self._awake("flush_cache")
        async with self._alone(deadline, "flush_cache"), self._generation.quiet():
            return await self._engine.operate("flush_cache", {})

    async def _clear_storage(self, params: NoParams, deadline: float) -> Mapping[str, Any]:
        self._awake("clear_storage")
        async with self._alone(deadline, "clear_storage"), self._generation.quiet():
            return await self._engine.operate("clear_storage", {})

    def _awake(self, what: str) -> None:
        if self._frozen:
            raise RequestRefused(f"{what}: the engine is paused in place with its requests' KV: resume it first")
        if self._sleep.asleep:
            raise RequestRefused(f"{what}: the engine is asleep: {self.told()}")

    # --- memory ----------------------------------------------------------------------------------------------------

    async def _go_to_sleep(self, params: SleepParams, deadline: float) -> Mapping[str, Any]:
        tags = self._state.to_sleep(params.tags)
        if self._frozen:
            raise RequestRefused("sleep: the engine is paused in place with its requests' KV: resume it first")
        await self._engine.operate("sleep", {"tags": ()})  # whether it can at all, before anything is interrupted
        follower, generation = self.follower, self._generation
        async with self._alone(deadline, "sleep"):
            if follower.give_way is not None and not await follower.give_way("the engine goes to sleep"):
                raise EngineError("sleep: the engine still sends its weights to others")
            generation.close_gate("asleep")
            try:
                await self._interrupt()
                await self._engine.operate("sleep", {"tags": tags})
            except BaseException:
                if not self._sleep.asleep:
                    generation.open_gate("asleep")
                raise
            self._sleep = self._sleep.sleep(tags)
            if not self._sleep.takes_weights:
                follower.holds.add("asleep")
        self._poke()
        if params.hand_back:
            await self._hand_back(deadline)
        return self.told()

    async def _wake(self, params: WakeParams, deadline: float) -> Mapping[str, Any]:
        tags, version = self._state.to_wake(params.tags), self._generation.version
        answer = await self._engine.operate("wake", {"tags": tags})
        intact = bool(answer.get("intact", True))
        self._sleep = self._sleep.wake(tags, intact=intact)
        if "weights" in tags:
            if not intact:
                self.follower.mend(patient=True)
            self.follower.holds.discard("asleep")
            self.follower.poke()
            if not intact and version == 0:
                await self._restore()
        if not self._sleep.asleep:
            self._generation.open_gate("asleep")
        self._poke()
        return self.told() | {"intact": intact, "version": self._generation.version}

    async def _restore(self) -> None:
        """The model as it was loaded from disk; a version that came from a trainer comes from there again."""
        model = Path(self._engine.info.model)
        nbytes = await asyncio.to_thread(lambda: sum(file.stat().st_size for file in model.glob("*.safetensors")))
        if not nbytes:
            log.warning("woken weights are no version, and %s has none to read: the engine will be restarted", model)
            self.follower.mend()
            return
        report = await self.follower.load(disk_order(str(model), 0, TIMEOUT_S + nbytes / SLOWEST))
        if report.ok:
            self.follower.look_again()
        elif self.follower.quarantined:  # else a trainer's version was faster
            log.error("woken weights could not be read from %s: %s: %s", model, report.phase, report.error)
            self.follower.mend()


def disk_order(path: str, version: int, timeout_s: float) -> TransferOrder:
    """For an engine to load what a folder has, as `version`."""
    return TransferOrder(
        version=version,
        epoch=next(_numbers),
        transport="disk",
        host="",
        port=0,
        group="",
        rank_offset=0,
        world_size=1,
        timeout_s=timeout_s,
        nonfinite="allow",  # a snapshot has what its trainer let pass; a checkpoint with NaN is refused as it is opened
        path=path,
    )
