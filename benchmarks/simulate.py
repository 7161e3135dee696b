"""`python -m benchmarks staleness`: what a bound on staleness costs and gains, computed in virtual time.

There is neither a trainer nor a pool. The rules are the real ones: `Staleness` and `Books` decide, as in a feed. Only
generation and training are durations.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from rolloutmq.messages.errors import InvalidField
from rolloutmq.ops.cli.options import ids
from rolloutmq.ops.flags import parse_extra
from rolloutmq.producer.training import Books, Measured, Staleness

from . import harness
from .harness import option

WARM_UP = 0.1
"""Share of the steps that the figures leave out: a run begins with an empty pool."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What is simulated.

    slots: samples that the pool generates at once. tokens_per_s: of one sample. tokens: median length of a sample.
    tail: sigma of the lengths' log-normal distribution; 0 makes all of them equal. most_tokens: where lengths end.
    step_s: seconds of training on one batch. transfer_s: seconds from an update until the pool has its weights; samples
    that begin meanwhile begin with older ones. sync_s: seconds for which nothing is generated when they have arrived.
    batch_size: samples of a step. group: samples of a prompt.
    """

    slots: int = 128
    tokens_per_s: float = 50.0
    tokens: int = 500
    tail: float = 0.5
    most_tokens: int = 16_384
    step_s: float = 10.0
    sync_s: float = 0.1
    batch_size: int = 64
    group: int = 8
    transfer_s: float = 0.0

    def __post_init__(self) -> None:
        for one in fields(self):
            value, may_be_0 = getattr(self, one.name), one.name in ("tail", "sync_s", "transfer_s")
            if not (isinstance(value, int | float) and 0 <= value < 1e9 and (value > 0 or may_be_0)):
                raise InvalidField(one.name, value, "a number up to 1e9, and 0 only for tail, sync_s and transfer_s")
        if self.batch_size % self.group:
            raise InvalidField("group", self.group, f"a divisor of batch_size={self.batch_size}")


SHAPES = {
    "balanced": Shape(),
    "slow-trainer": Shape(step_s=40.0),
    "slow-pool": Shape(slots=32),
    "heavy-tail": Shape(tokens=250, tail=1.5),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one bound, after the warm-up.

    samples_per_s: trained. trainer_idle, pool_idle: shares of the time, the latter of all slots. staleness: mean of the
    trained samples; max_staleness: the largest. dropped: share of the samples that ended. length: mean length of what
    was trained, divided by that of all samples: below 1 the long ones are starved.
    """

    eta: int
    samples_per_s: float
    trainer_idle: float
    pool_idle: float
    staleness: float
    max_staleness: int
    dropped: float
    length: float


class Run:
    """One trainer with one bound. Same arguments, same outcome."""

    def __init__(self, shape: Shape, rule: Staleness, seed: int) -> None:
        self.shape, self.rule, self.books = shape, rule, Books()
        self._draw = random.Random(seed)
        self._queue: deque[tuple[int, int]] = deque()  # prompt and sample, not begun
        self._running: list[tuple[float, int, int]] = []  # the pool's time at its end, prompt, sample
        self._born: dict[tuple[int, int], int] = {}
        self._lengths: dict[tuple[int, int], int] = {}
        self._missing: dict[int, int] = {}  # prompt -> samples that have not ended
        self._arriving: deque[tuple[float, int]] = deque()  # versions on their way, with the time of their arrival
        self._version = 0  # that the pool has
        self.now = self._paused = self._frozen = 0.0
        self._training_until: float | None = None
        self._batch: list[int] = []
        self.idle = self.busy_slots = 0.0  # seconds of the trainer, seconds of slots
        self.asked = [0, 0]  # samples and tokens of all that ended

    def step(self) -> None:
        """Until one more batch is trained."""
        self._refill()
        while self._training_until is None and not self._begin():
            self._pass(self._next())
        assert self._training_until is not None
        while self._next() <= self._training_until:
            self._pass(self._next())
        self._pass(self._training_until)
        self._trained()

    # --- time ------------------------------------------------------------------------------------------------------

    def _next(self) -> float:
        """When the next sample ends or the next version arrives."""
        arrival = self._arriving[0][0] if self._arriving else math.inf
        return min(arrival, self._next_end())

    def _next_end(self) -> float:
        return self._running[0][0] + self._paused if self._running else math.inf

    def _pass(self, until: float) -> None:
        """Time passes; samples that end by then end, and others begin."""
        generated = max(0.0, until - max(self.now, self._frozen))
        self.busy_slots += len(self._running) * generated
        self.idle += 0.0 if self._training_until is not None else until - self.now
        self.now = until
        while self._next_end() <= until:
            _, number, sample = heapq.heappop(self._running)
            self._missing[number] -= 1
            self.asked[0] += 1
            self.asked[1] += self._lengths[number, sample]
        if self._arriving and self._arriving[0][0] <= until:
            _, self._version = self._arriving.popleft()
            self._frozen, self._paused = self.now + self.shape.sync_s, self._paused + self.shape.sync_s
        self._start()

    def _start(self) -> None:
        while self._queue and len(self._running) < self.shape.slots and self._may_start(self._queue[0][0]):
            number, sample = self._queue.popleft()
            length = min(self.shape.most_tokens, self.shape.tokens * self._draw.lognormvariate(0.0, self.shape.tail))
            self._lengths[number, sample] = max(1, round(length))
            self._born[number, sample] = self._version
            begins = max(self.now, self._frozen) - self._paused
            seconds = self._lengths[number, sample] / self.shape.tokens_per_s
            heapq.heappush(self._running, (begins + seconds, number, sample))

    def _may_start(self, number: int) -> bool:
        """Whether the pool's weights are new enough for this prompt; see `Staleness.bound`.

        The bound at the claim is on versions that have arrived somewhere, and here there is one worker.
        """
        return not self.rule.needs_newest or self._version >= self.books.prompts[number].update

    # --- the trainer -----------------------------------------------------------------------------------------------

    def _refill(self) -> None:
        while self.rule.capacity(self.books.updates, self.books.live) >= self.shape.group:
            number = self.books.accept(self.shape.group)
            self._missing[number] = self.shape.group
            self._queue += [(number, sample) for sample in range(self.shape.group)]
        self._start()

    def _begin(self) -> bool:
        """Take a batch, if there is one."""
        books, rule = self.books, self.rule
        ready = [number for number in books.prompts if not self._missing[number]]
        if rule.on_stale == "drop":
            for number in ready:
                stale = [it for it in books.prompts[number].open if rule.is_stale(books.age(self._born[number, it]))]
                books.drop(number, stale, "stale", {it: self._measured(number, it) for it in stale})
            ready = [number for number in ready if number in books.prompts]
            self._refill()
        batch = ready[: self.shape.batch_size // self.shape.group]
        # Fewer only if nothing more can come: samples that were dropped from groups leave room for no whole one.
        if len(batch) < self.shape.batch_size // self.shape.group and (self._running or self._queue or not batch):
            return False
        if rule.on_stale == "wait" and any(self._missing[number] for number in books.prompts if number < batch[-1]):
            left = books.prompts.keys() - set(batch)
            ages = [(books.updates - books.prompts[it].update, len(books.prompts[it].open)) for it in left]
            if rule.too_late(ages):
                return False
        self._batch = batch
        self._training_until = self.now + self.shape.step_s
        return True

    def _measured(self, number: int, sample: int) -> Measured:
        return Measured(self._lengths[number, sample], None, self.books.age(self._born[number, sample]))

    def _trained(self) -> None:
        for number in self._batch:
            samples = self.books.prompts[number].open
            self.books.train(number, samples, self.books.updates, {it: self._measured(number, it) for it in samples})
        self.books.advance(self.books.version + 1)
        self._training_until = None
        self._arriving.append((self.now + self.shape.transfer_s, self.books.version))
        if not self.shape.transfer_s:
            self._pass(self.now)
        self._refill()


def simulate(shape: Shape, rule: Staleness, steps: int, seed: int = 0) -> Outcome:
    """What comes of `steps` steps. Raises InvalidField."""
    if steps < 2:
        raise InvalidField("steps", steps, "at least 2")
    run = Run(shape, replace(rule, batch_size=shape.batch_size), seed)
    warm = max(1, round(steps * WARM_UP))
    for _ in range(warm):
        run.step()
    books = run.books
    began, idle, busy, trained = run.now, run.idle, run.busy_slots, books.trained
    dropped, ages = books.dropped.total(), books.staleness.copy()
    for _ in range(steps - warm):
        run.step()
    books.check()
    passed, count = run.now - began, books.trained - trained
    new = books.staleness - ages
    gone = books.dropped.total() - dropped
    mean = books.report()["lengths"]["trained"]["mean"]
    return Outcome(
        rule.eta,
        count / passed,
        (run.idle - idle) / passed,
        1.0 - (run.busy_slots - busy) / (passed * shape.slots),
        sum(age * one for age, one in new.items()) / max(1, new.total()),
        max(new, default=0),
        gone / max(1, gone + count),
        mean * run.asked[0] / max(1, run.asked[1]),
    )


def sweep(shape: Shape, etas: Sequence[int], on_stale: Any, steps: int, seed: int) -> list[Outcome]:
    """The outcome of each bound."""
    return [simulate(shape, Staleness(eta, shape.batch_size, on_stale), steps, seed) for eta in etas]


@dataclass(frozen=True, slots=True)
class Plan:
    """What to compare."""

    etas: str = option("0,1,2,4,8", "Bounds to compare, with commas.")
    scenario: str = option("all", "balanced, slow-trainer, slow-pool, heavy-tail, or all of them.")
    on_stale: str = option("drop", "drop, mark or wait.")
    training_steps: int = option(200, "Of each run.", min=2, max=100_000)
    seed: int = option(0, "Of the lengths.", min=0)
    shape: list[str] = option([], "NAME=NUMBER in place of the scenarios' own, as a Shape has it; repeatable.")


def measure(plan: Plan, run: harness.Run) -> dict[str, Any]:
    """Throughput, idle time and staleness against the bound eta, for slow trainers, slow pools and long samples."""
    if plan.scenario not in (*SHAPES, "all"):
        raise InvalidField("--scenario", plan.scenario, f"all, or one of {', '.join(SHAPES)}")
    etas = ids("--etas", plan.etas, "bounds such as 0,1,4")
    own = parse_extra(plan.shape)
    if strange := own.keys() - {one.name for one in fields(Shape)}:
        raise InvalidField("--shape", min(strange), f"one of {', '.join(one.name for one in fields(Shape))}")
    shapes = {name: replace(shape, **own) for name, shape in SHAPES.items() if plan.scenario in (name, "all")}
    found: dict[str, list[Outcome]] = {}
    for name, shape in shapes.items():
        found[name] = sweep(shape, etas, plan.on_stale, plan.training_steps, plan.seed)
        for outcome in found[name]:
            run.say(f"{name}:", **{field: round(value, 3) for field, value in asdict(outcome).items()})
    scenarios = {
        name: {"shape": asdict(shape), "outcomes": [asdict(one) for one in found[name]]}
        for name, shape in shapes.items()
    }
    return {"on_stale": plan.on_stale, "steps": plan.training_steps, "seed": plan.seed, "scenarios": scenarios}
