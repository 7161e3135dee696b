"""`python -m benchmarks staleness`: what a bound on staleness costs and gains, computed in virtual time.

There is neither a trainer nor a pool. The rules are the real ones: `Staleness` and `Books` decide, as in a feed. Only
generation and training are durations.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rolloutmq.messages.errors import InvalidField
from rolloutmq.ops.cli.options import ids
from rolloutmq.ops.files import check_out, writing
from rolloutmq.producer.training import Books, Measured, Staleness

from . import harness
from .harness import option

WARM_UP = 0.1
"""Share of the steps that the figures leave out: a run begins with an empty pool."""


MOST_SAMPLES = 1_000_000
"""Most samples that may be under way. More take minutes and gigabytes to simulate."""
LIMITS: Mapping[str, tuple[float, float]] = {
    "slots": (1, MOST_SAMPLES),
    "tokens_per_s": (1e-3, 1e9),
    "tokens": (1, 1e9),
    "tail": (0, 10),
    "most_tokens": (1, 1e9),
    "step_s": (1e-3, 1e6),
    "sync_s": (0, 1e6),
    "transfer_s": (0, 1e6),
    "batch_size": (1, MOST_SAMPLES),
    "group": (1, MOST_SAMPLES),
}
"""What each field of a Shape may be."""


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
        for name, (least, most) in LIMITS.items():
            if not least <= (value := getattr(self, name)) <= most:
                raise InvalidField(name, value, f"{least:g} to {most:g}")
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
    if (rule.eta + 1) * shape.batch_size > MOST_SAMPLES:
        raise InvalidField("eta", rule.eta, f"(eta + 1) x batch_size of at most {MOST_SAMPLES:,}")
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
    """What to compare. Whatever of a Shape is given takes the place of the scenarios' own."""

    etas: str = option("0,1,2,4,8", "Bounds to compare, with commas.")
    scenario: str = option("all", "balanced, slow-trainer, slow-pool, heavy-tail, or all of them.")
    on_stale: str = option("drop", "drop, mark or wait.")
    training_steps: int = option(200, "Of each run.", min=2, max=100_000)
    seed: int = option(0, "Of the lengths.", min=0)
    slots: int | None = option(None, "Samples that the pool generates at once.")
    tokens_per_s: float | None = option(None, "Of one sample.")
    tokens: int | None = option(None, "Median length of a sample.", name="median-tokens")
    tail: float | None = option(None, "Sigma of the lengths' log-normal distribution.")
    step_s: float | None = option(None, "Seconds of training on one batch.")
    sync_s: float | None = option(None, "Seconds without generation at an update.")
    transfer_s: float | None = option(None, "Seconds from an update until the pool has it.")
    batch_size: int | None = option(None, "Samples of a step.")
    group: int | None = option(None, "Samples of a prompt.", name="samples")
    plot: Path | None = option(None, "Write a PNG here; needs the extra `demo`.")


def measure(plan: Plan, run: harness.Run) -> dict[str, Any]:
    """Throughput, idle time and staleness against the bound eta, for slow trainers, slow pools and long samples."""
    if plan.plot is not None:
        check_out("--plot", plan.plot)
    if plan.scenario not in (*SHAPES, "all"):
        raise InvalidField("--scenario", plan.scenario, f"all, or one of {', '.join(SHAPES)}")
    etas = ids("--etas", plan.etas, "bounds such as 0,1,4")
    own: dict[str, Any] = {name: value for name in LIMITS if (value := getattr(plan, name, None)) is not None}
    shapes = {name: replace(shape, **own) for name, shape in SHAPES.items() if plan.scenario in (name, "all")}
    found: dict[str, list[Outcome]] = {}
    for name, shape in shapes.items():
        found[name] = sweep(shape, etas, plan.on_stale, plan.training_steps, plan.seed)
        for outcome in found[name]:
            run.say(f"{name}:", **{field: round(value, 3) for field, value in asdict(outcome).items()})
    if plan.plot is not None:
        with writing("--plot", plan.plot):
            plan.plot.parent.mkdir(parents=True, exist_ok=True)
            draw(plan.plot, found, f"on_stale={plan.on_stale}, {plan.training_steps} steps, seed {plan.seed}")
    scenarios = {
        name: {"shape": asdict(shape), "outcomes": [asdict(one) for one in found[name]]}
        for name, shape in shapes.items()
    }
    return {"on_stale": plan.on_stale, "steps": plan.training_steps, "seed": plan.seed, "scenarios": scenarios}


def draw(path: Path, found: dict[str, list[Outcome]], title: str) -> None:
    """Write a PNG: throughput, idle shares and staleness against eta."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(4, len(found), figsize=(3.6 * len(found), 11), sharex="col", layout="constrained")
    figure.suptitle(title)
    panels = (("samples_per_s", "samples/s"), ("trainer_idle", "trainer idle"), ("pool_idle", "pool idle"))
    for column, (name, outcomes) in enumerate(found.items()):
        own = axes[:, column] if len(found) > 1 else axes
        etas = [one.eta for one in outcomes]
        own[0].set_title(name)
        for axis, (field, label) in zip(own, panels, strict=False):
            axis.plot(etas, [getattr(one, field) for one in outcomes], marker="o", color="#2a6fb0")
            axis.set_ylim(bottom=0)
            axis.set_ylabel(label)
        own[3].plot(etas, [one.staleness for one in outcomes], marker="o", color="#b45f06", label="mean")
        own[3].plot(etas, [one.max_staleness for one in outcomes], linestyle="--", color="#b45f06", label="max")
        own[3].set(ylabel="staleness", xlabel="eta")
        own[3].legend(loc="upper left")
        for axis in own:
            axis.grid(alpha=0.25)
    figure.savefig(path, dpi=110)
    plt.close(figure)
