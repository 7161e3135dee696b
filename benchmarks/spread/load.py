"""What `benchmarks/spread` runs: cases, the lengths and arrivals of their samples, and how fast engines are."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

MEDIAN, SIGMA, MOST = 384, 0.6, 2048
"""Tokens of a sample: a log-normal distribution, cut off."""
PROMPT = 128
ROOM = 256
"""Samples that a worker runs at once at most."""
WAVES, WAVE_S = 4, 2.0
ONE_BY_ONE_S = 8.0
"""Simulated seconds in which jobs come one by one."""

MEASURED = {8: 263, 16: 249, 32: 227, 64: 195, 128: 149, 256: 102, 512: 36}
"""Samples at once -> tokens/s of each: a 4B shape on one H200, SGLang 0.5.17, bfloat16, 384 new tokens."""
BANDWIDTH = 4.0e12
"""Bytes a second at which an H200 reads weights."""
WEIGHTS = {"0.6b": 1.19e9, "4b": 8.04e9, "8b": 16.4e9}
CURVES = {
    "4b": "measured on one H200",
    "0.6b": "scaled from 4B, not measured: the reading of the weights (bytes / 4.0 TB/s) is exchanged",
    "8b": "scaled from 4B, not measured: the reading of the weights (bytes / 4.0 TB/s) is exchanged",
}


def step_of(curve: str) -> Callable[[int], float]:
    """Seconds of a step with so many samples: between the measured ones by a straight line, as beyond the ends."""
    counts = list(MEASURED)
    more = (WEIGHTS[curve] - WEIGHTS["4b"]) / BANDWIDTH
    steps = [1 / MEASURED[count] + more for count in counts]

    def step(count: int) -> float:
        i = min(max(bisect_left(counts, count), 1), len(counts) - 1)
        slope = (steps[i] - steps[i - 1]) / (counts[i] - counts[i - 1])
        return steps[i - 1] + slope * (count - counts[i - 1])

    table = [step(count) for count in range(counts[-1] + 1)]
    return table.__getitem__


@dataclass(frozen=True)
class Case:
    """One run. samples: all together, in jobs of n. arrival: once, waves, one (by one). churn: workers come and go.

    stretch: real seconds of a simulated one. prefills: tokens of a prompt that cost as much as an empty engine's step.
    runs: so many seeds are run, from `seed` on.
    """

    workers: int
    samples: int
    n: int = 1
    arrival: str = "once"
    curve: str = "4b"
    churn: bool = False
    stretch: float = 1.0
    prefills: float = 100.0
    seed: int = 1
    runs: int = 1

    @property
    def name(self) -> str:
        words = f"{self.workers} workers, {self.samples} samples, n={self.n}, {self.arrival}, {self.curve}"
        return words + (", come and go" if self.churn else "")


@dataclass(frozen=True)
class Arrival:
    """A job comes at a simulated time. lengths: tokens of its samples."""

    at: float
    lengths: tuple[int, ...]


def arrivals(case: Case) -> list[Arrival]:
    """The jobs of a case, in order. The same seed draws the same."""
    draw = random.Random(f"{case.seed} {case.samples} {case.n}")
    jobs = max(1, case.samples // case.n)
    lengths = [
        tuple(min(MOST, max(1, round(MEDIAN * draw.lognormvariate(0, SIGMA)))) for _ in range(case.n))
        for _ in range(jobs)
    ]
    if case.arrival == "waves":
        times = [WAVE_S * (WAVES * number // jobs) for number in range(jobs)]
    elif case.arrival == "one":
        times = sorted(draw.uniform(0, ONE_BY_ONE_S) for _ in range(jobs))
    else:
        times = [0.0] * jobs
    return [Arrival(at, one) for at, one in zip(times, lengths, strict=True)]


@dataclass(frozen=True)
class Change:
    """At a simulated time a worker dies, leaves and hands over what it has, or joins. number: of the worker."""

    at: float
    what: str
    number: int


def changes(case: Case) -> list[Change]:
    """Who comes and goes: an eighth dies, an eighth leaves, and as many join, over the first four seconds."""
    if not case.churn:
        return []
    some = max(1, case.workers // 8)
    found = [Change(1 + 3 * i / some, "dies", i) for i in range(some)]
    found += [Change(1.5 + 3 * i / some, "leaves", some + i) for i in range(some)]
    found += [Change(1.25 + 3 * i / (2 * some), "joins", case.workers + i) for i in range(2 * some)]
    return sorted(found, key=lambda one: one.at)


class Lost(NamedTuple):
    """A worker died with this sample. kept: tokens of it that the pool had. worker, job: their numbers."""

    worker: int
    job: int
    sample: int
    kept: int
