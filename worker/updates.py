"""What updates cost a worker, how often it may have one, and which mode is cheapest for it."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from ..messages.errors import RolloutMQError
from ..messages.model import UpdateMode, WeightAnnouncement
from ..sync.transfer import Ledger, TransferReport
from .engine import Engine
from .in_flight import InFlight
from .jobs import Run, SampleRun
from .slots import Slots

SHARE, AUTO_SHARE = 0.25, 0.02
"""Most of its time that a worker spends on updates; and with mode "auto", unless the trainer waits for the version."""
AGE_SHARE = 0.5
"""With mode "auto" an update is put off by at most this share of the mean age of what runs: short samples would be much
staler if it waited longer."""
TRIAL_TOKENS = 4096
"""With mode "auto": so many are computed anew before it is known how long that takes."""
STAGGER = 3.0
"""Workers begin an update at any moment of so many times what the last one cost, so a third of them computes anew."""
LATER_S = 0.5
"""A worker that takes a version so many seconds later, or more, tells its sender."""
NOT_IN_PLACE = "cannot be updated in place with"
"""What engines say that are configured so."""
LOOK_S, LONGEST_LOOK_S = 0.005, 0.25


class UpdateBudget:
    """Keeps what updates cost within a share of a worker's time.

    An update stops what runs. With mode "resume" a sample then computes its cache anew, from its prompt to its newest
    token. So an update costs the time from when work stops until everything that it stopped has a new token, and the
    next one may begin (1 / SHARE - 1) times as long after that. However often versions come, every sample goes on.
    With "auto" it is up to (1 / AUTO_SHARE - 1) times, unless somebody waits for the version.

    lost_s, tokens_anew: of all updates so far, their cost in seconds, and of how many tokens caches were computed anew,
    at most: those that samples share count for each. usual: the mode that the trainer asks for, but "drain".
    on_change(): it is time to look again whether one may begin. on_cost(mode, version, seconds, tokens): what one cost
    that stopped anything.
    """

    def __init__(self, engine: Engine, slots: Slots, in_flight: InFlight) -> None:
        self.on_change: Callable[[], None] = lambda: None
        self.on_cost: Callable[[UpdateMode, int, float, int], None] = lambda *_: None
        self.lost_s, self.tokens_anew = 0.0, 0
        self.usual: UpdateMode = "resume"
        self._engine, self._slots, self._in_flight = engine, slots, in_flight
        self._began = self._ended = self._cost_s = 0.0
        self._interval_s = math.inf  # between the last two updates
        self._tokens_per_s = 0.0  # at which caches are computed anew; 0 if not known
        self._behind_since = self._turn = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._watching: asyncio.Task[None] | None = None
        self._only_anew = False

    def wait_s(self, mode: UpdateMode, *, awaited: bool = False) -> float:
        """Seconds until the next update may begin. A version has come that this worker lacks.

        awaited: whether the trainer waits for it.
        """
        now = time.monotonic()
        self._behind_since = self._behind_since or now
        if mode == "drain" or not self._in_flight.running:
            return 0.0  # it stops nothing
        sparing = mode == "auto" and not awaited
        if self._watching is not None:
            return max(LOOK_S, self._rest_s(now - self._began, sparing=sparing))
        turn = self._behind_since + self._turn * STAGGER * self._cost_s
        return max(0.0, self._ended + self._rest_s(self._cost_s, sparing=sparing) - now, turn - now)

    def _rest_s(self, cost_s: float, *, sparing: bool) -> float:
        """How long nothing is updated after an update that cost so much."""
        least = cost_s * (1 / SHARE - 1)
        if not sparing:
            return least
        ages = [one.age_s for one in self._running()]
        return max(least, min(cost_s * (1 / AUTO_SHARE - 1), AGE_SHARE * sum(ages) / max(1, len(ages))))

    async def postpones(self, told: WeightAnnouncement, worker_id: str, ledger: Ledger) -> bool:
        """Whether this update would cost too much now. The worker takes the newest version when it may."""
        self.usual = told.mode if told.mode != "drain" else "resume"
        seconds = self.wait_s(told.mode, awaited=told.awaited)
        if seconds > LATER_S:
            await ledger.later(told, worker_id, seconds)
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, self.on_change) if seconds else None
        return seconds > 0

    def choose(self, mode: UpdateMode) -> UpdateMode:
        """Return the mode for an update that is about to begin: for "auto", the one that costs less."""
        if mode != "auto":
            return mode
        # After a pause versions may come as often as before, so that the last interval counts, too.
        tokens, since = _tokens(self._running()), min(self._interval_s, time.monotonic() - self._began)
        if self._only_anew or not tokens:
            return "resume"
        if not self._tokens_per_s:
            return "resume" if tokens <= TRIAL_TOKENS else "in_place"
        return "resume" if tokens / self._tokens_per_s <= AUTO_SHARE * since else "in_place"

    def refused_in_place(self, report: TransferReport) -> bool:
        """Whether an update failed because the engine changes no weights in place. Then "auto" no longer does it."""
        refused = not report.ok and NOT_IN_PLACE in report.error
        self._only_anew = self._only_anew or refused
        return refused

    def forget(self) -> None:
        """The engine is a new one, with nothing in it."""
        if self._watching is not None:
            self._watching.cancel()
        self._watching, self._only_anew = None, False
        self._cost_s = self._tokens_per_s = 0.0

    @asynccontextmanager
    async def timed(self, mode: UpdateMode, version: int) -> AsyncIterator[None]:
        """An update to `version`, from before the work stops until it may go on."""
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None
        now = time.monotonic()
        self._interval_s = now - self._began if self._began else math.inf
        self._began = now
        # A task runs again if the weights change under it.
        stopped = [one for one in self._running() if mode == "resume" or not isinstance(one, SampleRun)]
        try:
            yield
        finally:
            self._behind_since, self._turn = 0.0, random.random()
            self._watching = asyncio.create_task(self._watch(stopped, mode, version))

    async def _watch(self, stopped: Sequence[Run], mode: UpdateMode, version: int) -> None:
        """Wait until all of these go on, and note what the update cost."""
        tokens, anew = _tokens(stopped), [one for one in stopped if isinstance(one, SampleRun) and one.starts_over]
        while await self._stand(stopped):  # noqa: ASYNC110 – the engine is asked
            await asyncio.sleep(min(LONGEST_LOOK_S, max(LOOK_S, (time.monotonic() - self._began) / 16)))
        self._ended = time.monotonic()
        self._cost_s = self._ended - self._began
        self.lost_s += self._cost_s
        self.tokens_anew += tokens
        if tokens:
            self._tokens_per_s = tokens / self._cost_s
        if stopped:
            self.on_cost(mode, version, self._cost_s, tokens)
        # These began from nothing. Once is enough: they end before the next update.
        while self._here(anew):  # noqa: ASYNC110
            await asyncio.sleep(LONGEST_LOOK_S)
        self._watching = None
        self.on_change()

    async def _stand(self, stopped: Sequence[Run]) -> bool:
        """Whether some of these have no new token. False if the engine cannot say, or something else stopped them."""
        stopped_again = not (self._slots.gate.is_open or self._in_flight.running)
        if stopped_again or not self._here(stopped):
            return False
        try:
            told: Any = await self._engine.operate("generated", {})
            going = set(told["requests"])
        except (RolloutMQError, KeyError, TypeError):
            return False
        return any(one.leg is None or one.leg.request_id not in going for one in self._here(stopped))

    def _here(self, samples: Sequence[Run]) -> list[Run]:
        """Those that have not ended, and that this worker still has."""
        waiting = {id(sample) for sample in self._slots.waiting}
        return [one for one in samples if not one.dropped and (one.leg is not None or id(one) in waiting)]

    def _running(self) -> list[Run]:
        return list(self._in_flight.running.values())


def _tokens(samples: Sequence[Run]) -> int:
    return sum(len(one.prompt) + (one.known_tokens if isinstance(one, SampleRun) else 0) for one in samples)
