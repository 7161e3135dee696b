"""How evenly a pool's workers are loaded, as their last claims said it, which is exact and newer than heartbeats.

And how much of their time updates of the weights cost, as their heartbeats say it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from redis.exceptions import ResponseError

from ..messages.broker import Broker
from ..messages.model import WorkerStatus
from ..messages.redis import is_wrong_type, text

SAME_PACE, FASTEST = 1.25, 16.0
"""As in messages/scripts/lib_spread.lua, which also says what the hash `takers` has of a worker."""
EVEN = 1.25
"""A load up to so many times its share counts as even."""
COSTLY = 0.05
"""From this share of the workers' time on, what updates cost is worth a word."""
PLACES = ("below", "at", "above")
_TAKER = re.compile(r"(\d{1,15}) (\d{1,15}) (\S+) \d+ \d+ (\S+) ")


@dataclass(frozen=True, slots=True)
class Taker:
    """What a worker holds, and the most that it can hold, in samples. pace: how fast its engine is, 0 for unknown.
    engine: stands for the kind of engine; those of one kind count as equally fast.

    kind: stands for what it can do. share: what it would hold if all that workers of its kind hold were even, by how
    fast they are and what they can hold.
    """

    held: int
    most: int
    pace: float
    kind: str
    engine: str = ""
    share: float = 0.0

    @property
    def load(self) -> float:
        """What it holds beside its share, which is rounded up: nobody holds a part of a sample."""
        return self.held / max(1, math.ceil(round(self.share, 6)))

    @property
    def place(self) -> str:
        """One of PLACES."""
        return "above" if self.load > EVEN else "below" if self.held * EVEN < math.floor(round(self.share, 6)) else "at"


@dataclass(frozen=True, slots=True)
class Sharing:
    """The workers that share a pool's work, by id. Those that leave their share to others are not among them."""

    takers: Mapping[str, Taker] = field(default_factory=dict)

    @property
    def imbalance(self) -> float:
        """The highest load beside its share; 1 if loads are even, or nobody holds anything."""
        return max([1.0, *(taker.load for taker in self.takers.values())])

    def count(self, place: str) -> int:
        """How many workers are in this one of PLACES."""
        return sum(taker.place == place for taker in self.takers.values())


async def read_sharing(parts: Iterable[Broker]) -> Sharing:
    """Read it, with one command in each shard. What is no such thing is left out."""
    found: dict[str, Taker] = {}
    for part in parts:
        redis: Any = part.redis
        try:
            told = await redis.hgetall(part.keys.takers)
        except ResponseError as error:
            if not is_wrong_type(error):
                raise
            continue  # the next claim sets it aside
        for worker, said in told.items():
            if (one := _parsed(said)) is not None:
                found[text(worker)] = _together(found.get(text(worker)), one)
    return Sharing(dict(zip(found, shared(found.values()), strict=True)))


def _parsed(said: bytes) -> Taker | None:
    match = _TAKER.match(text(said))
    if match is None:
        return None
    held, most = int(match[1]), int(match[2])
    pace, _, engine = match[3].partition("/")
    try:
        known = float(pace)
    except ValueError:
        known = 0.0
    return Taker(held, max(held, most), known if 0 < known < math.inf else 0.0, match[4], engine)


def _together(one: Taker | None, other: Taker) -> Taker:
    """One worker in several shards: its room is the same in each."""
    if one is None:
        return other
    room = max(one.most - one.held, other.most - other.held)
    return replace(one, held=one.held + other.held, most=one.held + other.held + room)


def shared(takers: Iterable[Taker]) -> list[Taker]:
    """The same workers with their shares."""
    takers = list(takers)
    mean = _mean(takers)
    speeds = {
        engine: _speed(_mean([it for it in takers if it.engine == engine]), mean)
        for engine in {it.engine for it in takers}
    }
    levels = {
        kind: _level([(it, speeds[it.engine]) for it in takers if it.kind == kind])
        for kind in {it.kind for it in takers}
    }
    return [replace(it, share=min(float(it.most), levels[it.kind] * speeds[it.engine])) for it in takers]


def _mean(takers: list[Taker]) -> float:
    paces = [taker.pace for taker in takers if taker.pace]
    return sum(paces) / len(paces) if paces else 0.0


def _speed(pace: float, mean: float) -> float:
    speed = pace / mean if pace and mean else 1.0
    return 1.0 if 1 / SAME_PACE < speed < SAME_PACE else max(1 / FASTEST, min(FASTEST, speed))


def _level(group: list[tuple[Taker, float]]) -> float:
    """What each would hold at speed 1 if all were even and none held more than it can."""
    rest, speeds = float(sum(taker.held for taker, _ in group)), sum(speed for _, speed in group)
    for taker, speed in sorted(group, key=lambda it: it[0].most / it[1]):
        if taker.most / speed >= rest / speeds:
            return rest / speeds
        rest, speeds = rest - taker.most, speeds - speed
    return 0.0


def update_share(workers: Sequence[WorkerStatus]) -> float:
    """The share of these workers' last minute that updates of the weights cost, 0 to 1."""
    return round(sum(worker.update_share for worker in workers) / max(1, len(workers)), 3)
