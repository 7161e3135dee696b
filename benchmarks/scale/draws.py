"""What chance decides in a run. Each kind has its own generator, so the same seed gives the same load to any pool."""

from __future__ import annotations

import math
import random
from statistics import NormalDist

from .scenario import Scenario


class Draws:
    """Numbers of one run, the same for the same scenario and seed."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self._scenario = scenario
        kinds = ("arrivals", "lengths", "starts", "rates", "pre-emptions")
        self._of = {kind: random.Random(f"{seed}/{kind}") for kind in kinds}

    def next_arrival(self, now: float) -> float | None:
        """When the next job arrives after `now`; None if the load has ended by then."""
        one, most = self._scenario, max(self._scenario.load)
        seconds, draw = 60 * one.minutes, self._of["arrivals"]
        per_s = most * one.max_workers * one.slots * one.tokens_per_s / (self.mean_tokens() * one.group)
        while per_s > 0 and (now := now + draw.expovariate(per_s)) < seconds:
            if draw.random() * most <= one.load[int(now / seconds * len(one.load))]:
                return now
        return None

    def mean_tokens(self) -> float:
        """Mean length of a sample."""
        one, normal = self._scenario, NormalDist()
        mu, sigma, most = math.log(one.tokens), one.tokens_spread, math.log(one.most_tokens)
        if sigma == 0:
            return min(one.tokens, one.most_tokens)
        within = math.exp(mu + sigma**2 / 2) * normal.cdf((most - mu) / sigma - sigma)
        return within + one.most_tokens * (1 - normal.cdf((most - mu) / sigma))

    def lengths(self) -> list[int]:
        """Lengths of a job's samples, in blocks."""
        one = self._scenario
        found = (self._spread("lengths", one.tokens, one.tokens_spread) for _ in range(one.group))
        return [max(1, round(min(one.most_tokens, tokens) / one.block)) for tokens in found]

    def start_s(self) -> float:
        """How long the next worker takes to start."""
        return self._spread("starts", self._scenario.start_s, self._scenario.start_spread)

    def rate(self) -> float:
        """Blocks a second of each sample on the next worker."""
        one = self._scenario
        return self._spread("rates", one.tokens_per_s, one.tokens_per_s_spread) / one.block

    def lifetime_s(self) -> float:
        """How long the next worker serves until it is pre-empted."""
        per_s = self._scenario.preempted_per_hour / 3600
        return self._of["pre-emptions"].expovariate(per_s) if per_s else math.inf

    def noticed(self) -> bool:
        """Whether the next pre-emption comes with a notice."""
        return self._of["pre-emptions"].random() < self._scenario.noticed

    def wave(self, count: int) -> list[int]:
        """Which of `count` workers the next wave takes."""
        return self._of["pre-emptions"].sample(range(count), round(self._scenario.wave_share * count))

    def _spread(self, kind: str, median: float, sigma: float) -> float:
        return median * self._of[kind].lognormvariate(0.0, sigma) if sigma else median
