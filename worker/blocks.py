"""What keeps a worker from serving, and who or what that is: for its status."""

from __future__ import annotations

import time
from typing import Any

from ..messages.model import Command, CommandReply, WorkerState
from .engine_keeper import EngineKeeper
from .engine_state import EngineState
from .journaling import WorkerJournal
from .weights import WeightFollower

GATES = frozenset({"pause", "sleep"})
"""Actions that keep a worker from serving until another one ends that."""


class Blocks:
    """What keeps one worker from serving."""

    def __init__(self, engine: EngineState, keeper: EngineKeeper, journal: WorkerJournal) -> None:
        self._engine, self._keeper, self._journal = engine, keeper, journal
        self._gated = ""
        self._state, self._since = "", 0.0

    def done(self, command: Command, reply: CommandReply) -> None:
        """A command was done, or refused."""
        self._journal.command(command, reply)
        if reply.ok and command.action in GATES:
            mode = command.params.get("mode", "")
            self._gated = f"{command.action} {mode}".strip() + (f" by {command.sender}" if command.sender else "")

    def told(self, state: WorkerState, follower: WeightFollower) -> dict[str, Any]:
        """The fields of its status that say it."""
        if state != self._state:
            self._state, self._since = state, time.time()
        blocks, why = self._found(follower)
        return {
            "blocks": blocks,
            "why": "; ".join(why)[:512],
            "restarts_in_a_row": self._keeper.in_a_row,
            "state_since": self._since,
        }

    def _found(self, follower: WeightFollower) -> tuple[tuple[str, ...], list[str]]:
        engine = self._engine
        found = {
            "pause": self._gated if engine.paused else "",
            "asleep": self._gated if engine.sleep.asleep else "",
            "stale": "its weights were asleep, and none have come since" if engine.sleep.stale else "",
            "dead": "its engine is being started again" if engine.dead.is_set() else "",
            "quarantine": "its weights are no whole version" if engine.quarantined else "",
        }
        behind = follower.catch_up.behind
        if not engine.dead.is_set() and (behind or not engine.in_service):
            trouble = follower.catch_up.trouble
            found["unavailable" if trouble else "version"] = behind + (f": {trouble}" if trouble else "") or "it looks"
        blocks = {name: why for name, why in found.items() if why}
        return tuple(blocks), list(dict.fromkeys(blocks.values()))
