"""How many workers a pool needs. Pure: no I/O, and no clock but the readings' own.

A trainer takes samples at its own pace, and bounds how stale they may be. So the queue alone says little:

- Work waits, and every slot is taken: the trainer waits for the pool. More workers help.
- Slots are free, and nothing waits: the trainer lets in no more samples, because they would be stale. More workers
  would only be idle, or make samples that wait and grow stale.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

State = Literal[
    "idle", "balanced", "starting", "starved", "saturated", "bound by staleness", "unclaimed", "paused", "unknown"
]
STATES: tuple[State, ...] = get_args(State)
"""idle: nothing waits and nothing runs. balanced: the workers are enough. starting: workers that are needed start.
starved: the trainer waits for the pool, and more workers are wanted. saturated: the same, but no more are allowed.
bound by staleness: the trainer lets in no more, or does not keep up. unclaimed: jobs wait though slots are free, so
no worker can run them. paused: an operator has paused the workers. unknown: the pool could not be read.
"""

FULL = 0.8
"""A pool is full if so many of its slots are taken."""
ROOM = 0.9
"""Workers that are kept are used up to this part of their slots and of their speed."""
P95 = 3.0
"""The p95 of durations that are distributed exponentially, over their mean."""
LONGEST_GAP_S = 30.0
"""Between two readings no more time than this counts. Nothing is known of an outage or of a clock that jumped."""
LONGEST_WINDOW_S = 3600.0
MOST_WORKERS = 1_000_000
UNCLAIMED_S = 60.0
"""Jobs that wait for so long while slots are free are jobs that no worker can run."""


@dataclass(frozen=True, slots=True)
class PoolView:
    """A pool at one moment. Tokens a second are measured, None before anything was.

    at: seconds on a monotonic clock of the caller.
    queued: samples that wait and that a worker with the newest committed weights may start.
    held_back: samples that wait for weights that the trainer has not published yet.
    running: samples in the engines of workers that serve. slots: how many these can decode at once.
    serving, starting, draining, paused: workers, each in one of these states. Starting are also those that sync.
    tokens_per_s: what the pool generates now. worker_tokens_per_s: what one worker generates when its slots are full.
    tokens_per_sample: mean length. sample_s: mean seconds from a sample's start to its end.
    version_s: seconds between two of the trainer's versions. eta: the staleness that the jobs allow.
    taken_tokens_per_s: what the clients acknowledge. unread_s: seconds that they need for the results they have not.
    """

    at: float
    queued: float = 0.0
    held_back: float = 0.0
    running: float = 0.0
    slots: float = 0.0
    serving: int = 0
    starting: int = 0
    draining: int = 0
    paused: int = 0
    tokens_per_s: float = 0.0
    worker_tokens_per_s: float | None = None
    tokens_per_sample: float | None = None
    sample_s: float | None = None
    version_s: float | None = None
    eta: int | None = None
    taken_tokens_per_s: float | None = None
    unread_s: float | None = None

    @property
    def present(self) -> int:
        """Workers that count. Those that drain do not: they will be gone."""
        return self.serving + self.starting + self.paused

    @property
    def is_full(self) -> bool:
        """Whether workers serve, and their slots are taken but for a few."""
        return self.serving > 0 and self.running >= FULL * self.slots

    @property
    def work_s(self) -> float | None:
        """Seconds that one worker would take for what waits; None if nothing was measured yet."""
        if self.queued <= 0:
            return 0.0
        if not self.worker_tokens_per_s or self.tokens_per_sample is None:
            return None
        return self.queued * self.tokens_per_sample / self.worker_tokens_per_s


@dataclass(frozen=True, slots=True)
class ScaleSettings:
    """What an operator decides.

    least, most: bounds of the number of workers. target_s: what waits should be generated within so many seconds.
    stabilise_s: a worker leaves when it was not needed for so long. Longer samples, versions and starts lengthen it.
    startup_s: from the start of a worker until it serves.
    """

    least: int = 0
    most: int = 4
    target_s: float = 60.0
    stabilise_s: float = 300.0
    startup_s: float = 60.0

    def window_s(self, view: PoolView) -> float:
        """Seconds for which a worker must not have been needed: no shorter than a start, two versions of the trainer
        and the p95 of a sample."""
        measured = max(P95 * (view.sample_s or 0.0), 2 * (view.version_s or 0.0))
        return max(self.stabilise_s, self.startup_s, min(measured, LONGEST_WINDOW_S))


@dataclass(frozen=True, slots=True)
class History:
    """What the policy remembers. Begin with `History()`, and give each call what the one before returned.

    at: of the last reading. clock: seconds that were watched. needs: earlier needs and when they were, falling: each
    is the highest since then. unclaimed_s: for how long jobs have waited beside free slots. wanted: the last answer.
    """

    at: float | None = None
    clock: float = 0.0
    needs: tuple[tuple[float, int], ...] = ()
    unclaimed_s: float = 0.0
    wanted: int = 0


@dataclass(frozen=True, slots=True)
class Decision:
    """wanted: number of workers, between least and most. need: what the pool needs at this moment, without bounds.
    why: for people. window_s: for how long a worker must not have been needed."""

    wanted: int
    state: State
    why: str
    need: int = 0
    window_s: float = 0.0


def decide(view: PoolView | None, settings: ScaleSettings, history: History) -> tuple[Decision, History]:
    """The number of workers, and what to hand to the next call. view: None if the pool could not be read.

    Up at once, down when a worker was not needed for a whole window. Guarantees: `wanted` is within the bounds; it
    does not fall without data; with the same history, more queued samples never lower it.
    """
    if view is None:
        wanted = _bounded(history.wanted, settings)
        return Decision(wanted, "unknown", "The pool cannot be read, so nothing is changed."), history
    passed = 0.0 if history.at is None else min(max(0.0, view.at - history.at), LONGEST_GAP_S)
    clock = history.clock + passed
    waits = view.queued > 0 and view.serving > 0 and not view.is_full
    unclaimed_s = history.unclaimed_s + passed if waits else 0.0
    need, state, why = _need(view, settings, unclaimed_s)
    window_s = settings.window_s(view)
    # Whoever begins to watch knows nothing of the window before: the present workers were needed.
    needs = history.needs if history.at is not None else ((clock, view.present),)
    kept = tuple((at, was) for at, was in needs if was > need and at > clock - window_s)
    highest = max([need, *(was for _, was in kept)])
    wanted = _bounded(highest, settings)
    if need > settings.most:
        state, why = "saturated" if state == "starved" else state, f"{why} No more than {settings.most} are allowed."
    if wanted > need:
        least = wanted == settings.least
        why += (
            f" {wanted} stay: {'no fewer are allowed' if least else f'{highest} were needed within {window_s:.0f} s'}."
        )
    decision = Decision(wanted, state, why, need, window_s)
    return decision, History(view.at, clock, (*kept, (clock, need)), unclaimed_s, wanted)


def _workers(count: float) -> int:
    """Whole workers. What was measured may be next to nothing, and then infinitely many would be needed."""
    return math.ceil(min(count, MOST_WORKERS))


def _bounded(count: int, settings: ScaleSettings) -> int:
    return max(settings.least, min(settings.most, count))


def _need(view: PoolView, settings: ScaleSettings, unclaimed_s: float) -> tuple[int, State, str]:
    """The number of workers that the pool needs now, its state, and why."""
    if view.paused and not view.serving:
        return view.present, "paused", f"{view.paused} workers are paused, so nothing is changed."
    need, state, why = _for_queue(view, settings, unclaimed_s) if view.queued > 0 else _for_running(view)
    if state != "unclaimed" and (enough := _to_keep_up(view)) is not None and enough < need:
        told = f"Results wait for their clients for more than {view.eta} versions: {enough} make as many as are taken."
        return enough, "bound by staleness", told
    return need, state, why


def _to_keep_up(view: PoolView) -> int | None:
    """Workers that make what the clients take, if the clients are so far behind that what is made now will be too stale
    when they take it. None if they are not, or if nobody knows."""
    if view.eta is None or not view.version_s or view.unread_s is None or not view.worker_tokens_per_s:
        return None
    if view.unread_s <= (view.eta + 1) * view.version_s:
        return None
    return max(1, _workers((view.taken_tokens_per_s or 0.0) / (ROOM * view.worker_tokens_per_s)))


def _kept(view: PoolView) -> int:
    """How many of the workers that serve are needed for what runs."""
    if view.running <= 0 or not view.serving:
        return 0
    by_slots = view.running * view.serving / (ROOM * max(1.0, view.slots))
    by_speed = view.tokens_per_s / (ROOM * view.worker_tokens_per_s) if view.worker_tokens_per_s else 0.0
    return min(view.serving, max(1, _workers(by_slots), _workers(by_speed)))


def _for_running(view: PoolView) -> tuple[int, State, str]:
    """Nothing waits that a worker could start."""
    kept = _kept(view)
    if view.held_back > 0:
        told = f"{view.held_back:.0f} samples wait for weights that the trainer has not published."
        return max(1, kept), "bound by staleness", told
    if view.running <= 0:
        return 0, "idle", "Nothing waits and nothing runs."
    used = f"{view.running:.0f} of {view.slots:.0f} slots are taken, and nothing waits"
    if view.eta is not None and not view.is_full:
        return kept, "bound by staleness", f"{used}: with a staleness of {view.eta} the trainer lets in no more."
    return kept, "balanced", f"{used}."


def _for_queue(view: PoolView, settings: ScaleSettings, unclaimed_s: float) -> tuple[int, State, str]:
    """Samples wait that a worker could start."""
    kept, present, work_s = _kept(view), view.present, view.work_s
    waits = f"{view.queued:.0f} samples wait"
    if view.serving and not view.is_full:
        if unclaimed_s < UNCLAIMED_S:
            return max(1, kept, present), "balanced", f"{waits}, and slots are free."
        told = f"{waits}, and slots have been free for {unclaimed_s:.0f} s: no worker can run them."
        return max(1, kept), "unclaimed", told
    if work_s is None:
        return _unmeasured(view, waits)
    takes = f"{waits}: {work_s:.0f} s of work for one worker"
    need = max(1, kept, _workers(work_s / settings.target_s))
    if need <= present:
        return need, "balanced" if view.serving else "starting", f"{takes}, and {present} are there or starting."
    if present and work_s / present <= settings.startup_s:
        return present, "balanced", f"{takes}, which {present} will have done before another one serves."
    return need, "starved", f"{takes}, and every slot is taken: {need} would take {settings.target_s:.0f} s."


def _unmeasured(view: PoolView, waits: str) -> tuple[int, State, str]:
    """Nobody knows yet how fast a worker is: first one, then twice as many as serve, as far as slots are wanted."""
    present = view.present
    if not view.serving:
        return max(1, present), "starting" if present else "starved", f"{waits}, and no worker serves."
    by_slots = _workers((view.queued + view.running) * view.serving / max(1.0, view.slots))
    need = present if view.starting else max(present, min(by_slots, 2 * view.serving))
    return need, "starved" if need > present else "starting", f"{waits}, and nobody knows yet how long they take."
