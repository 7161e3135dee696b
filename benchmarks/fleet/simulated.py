"""A publication to many receivers with the production planner, and links that are simulated or throttled.

Every process sends one bucket after the other, at the rate of its link. A receiver asks for one bucket ahead, verifies
each, and offers it to others. Who dies is noticed by those that take from it after STALL_S, as if its host had lost
power: a process that is killed is noticed at once.
"""

from __future__ import annotations

import heapq
import itertools
import random
from dataclasses import dataclass, field
from typing import Any

from rolloutmq.sync.wire.frames import STALL_S
from rolloutmq.sync.wire.relay_tree import RelayTree

TRAINER = ""
ANSWER_S = 0.001
"""Seconds of a question and its answer: to join, to ask for another source, to ask for a bucket."""


@dataclass(slots=True)
class Node:
    """A process. has: buckets that are here and verified. queue: who waits for which bucket. busy: whether it sends."""

    name: str
    has: int = 0
    queue: list[tuple[str, int]] = field(default_factory=list)
    busy: bool = False
    dead: bool = False
    source: str | None = None
    asked: int = 0
    done_at: float = 0.0
    avoid: set[str] = field(default_factory=set)


class Publication:
    """One version to `receivers` of them. link: bytes a second of each process's uplink. verify: bytes a second.

    deaths: seconds at which one of them dies, drawn by `dice`. join_s: within so many seconds all have joined.
    """

    def __init__(
        self,
        receivers: int,
        buckets: int,
        nbytes: int,
        *,
        link: float,
        verify: float,
        deaths: list[float],
        dice: random.Random,
        join_s: float = 0.05,
    ) -> None:
        self.sources, self.buckets, self.copies = RelayTree(), buckets, 0.0
        self._send_s, self._verify_s = nbytes / link, nbytes / verify
        self._nodes = {TRAINER: Node(TRAINER, has=buckets)}
        self._events: list[tuple[float, int, Any, tuple[Any, ...]]] = []
        self._order = itertools.count()
        self._now, self._dice, self.behind = 0.0, dice, set[str]()
        for number in range(receivers):
            self._at(dice.uniform(0.0, join_s), self._join, f"r{number}")
        for moment in deaths:
            self._at(moment, self._die)

    def run(self) -> dict[str, float]:
        """Seconds until each receiver that lives has all of it, verified."""
        while self._events:
            self._now, _, do, args = heapq.heappop(self._events)
            do(*args)
        self.copies /= self.buckets
        living = [node for name, node in self._nodes.items() if name != TRAINER and not node.dead]
        if any(not node.done_at for node in living):
            raise SystemExit("a receiver never got the version")
        return {node.name: node.done_at for node in living}

    def _at(self, moment: float, do: Any, *args: Any) -> None:
        heapq.heappush(self._events, (moment, next(self._order), do, args))

    def _join(self, name: str) -> None:
        self._nodes[name] = Node(name)
        self.sources.join(name, name)
        self._ask(name)

    def _ask(self, name: str) -> None:
        node = self._nodes[name]
        if node.dead or node.done_at:
            return
        node.source = self.sources.source(name, frozenset(node.avoid))
        if node.source in node.avoid:
            node.avoid.clear()
        node.asked = node.has
        for _ in range(2):  # one, and one ahead
            self._at(self._now + ANSWER_S, self._want, name, node.source)

    def _want(self, name: str, source: str) -> None:
        node = self._nodes[name]
        if not self._takes(name, source) or node.asked >= self.buckets:
            return
        if self._nodes[source].dead:
            self._at(self._now + STALL_S, self._leave, name, source)
            return
        self._nodes[source].queue.append((name, node.asked))
        node.asked += 1
        self._serve(source)

    def _serve(self, source: str) -> None:
        holder = self._nodes[source]
        if holder.busy or holder.dead:
            return
        waiting = [(name, index) for name, index in holder.queue if self._takes(name, source)]
        holder.queue = [entry for entry in waiting if entry[1] >= holder.has]
        here = [entry for entry in waiting if entry[1] < holder.has]
        if here:
            holder.busy = True
            holder.queue = here[1:] + holder.queue
            self._at(self._now + self._send_s, self._sent, source, *here[0])

    def _takes(self, name: str, source: str) -> bool:
        node = self._nodes[name]
        return not node.dead and node.source == source

    def _sent(self, source: str, name: str, index: int) -> None:
        holder = self._nodes[source]
        holder.busy = False
        if source == TRAINER:
            self.copies += 1
        if not holder.dead and self._takes(name, source):
            self._at(self._now + self._verify_s, self._verified, name, index)
            self._want(name, source)
        self._serve(source)

    def _verified(self, name: str, index: int) -> None:
        node = self._nodes[name]
        if node.dead or index != node.has:
            return
        node.has += 1
        if node.has == self.buckets:
            node.done_at = self._now
            self.sources.done(name)
        self._serve(name)

    def _die(self) -> None:
        victim = self._dice.choice([node for node in self._nodes.values() if node.name and not node.dead])
        victim.dead = True
        below = [node.name for node in self._nodes.values() if node.source == victim.name and not node.done_at]
        for name in below:
            self._at(self._now + STALL_S, self._leave, name, victim.name)
        while below:
            name = below.pop()
            self.behind.add(name)
            below += [
                node.name for node in self._nodes.values() if node.source == name and node.name not in self.behind
            ]
        self.sources.gone(victim.name)

    def _leave(self, name: str, source: str) -> None:
        node = self._nodes[name]
        if self._takes(name, source):
            node.avoid.add(source)
            self._ask(name)


def measure(
    receivers: int,
    buckets: int,
    nbytes: int,
    *,
    link: float,
    verify: float,
    runs: int,
    death_every_s: float,
    seed: int = 1,
) -> dict[str, Any]:
    """Publications left alone, and as many with a death every so many seconds, at moments that the dice draw."""
    dice, still, shaken, behind, copies = (
        random.Random(seed),
        list[float](),
        list[float](),
        list[float](),
        list[float](),
    )
    for _ in range(runs):
        alone = Publication(receivers, buckets, nbytes, link=link, verify=verify, deaths=[], dice=dice)
        still += alone.run().values()
        moments, moment = list[float](), dice.uniform(0.0, death_every_s)
        while moment < 2 * max(still):
            moments.append(moment)
            moment += death_every_s
        one = Publication(receivers, buckets, nbytes, link=link, verify=verify, deaths=moments, dice=dice)
        had = one.run()
        shaken += had.values()
        behind += [seconds for name, seconds in had.items() if name in one.behind]
        copies += [alone.copies, one.copies]
    return {
        "receivers": receivers, "GB": buckets * nbytes / 1e9, "buckets": buckets, "link_GB_s": link / 1e9,
        "verify_GB_s": verify / 1e9, "death_every_s": death_every_s, "runs": runs,
        "still_s": {"p50": _p(still, 0.5), "p99": _p(still, 0.99)},
        "with_deaths_s": {"p50": _p(shaken, 0.5), "p99": _p(shaken, 0.99)},
        "p99_of_still": round(_p(shaken, 0.99) / _p(still, 0.99), 3),
        "behind_a_victim": {"count": len(behind), "worst_s": _p(behind, 1.0)},
        "trainer_copies": round(max(copies), 2),
    }  # fmt: skip


def _p(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 3) if ordered else 0.0
