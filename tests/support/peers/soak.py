"""Many updates to several receivers while they are killed, stopped and broken at random: no hang, no wrong bit."""

from __future__ import annotations

import dataclasses
import random
import statistics
import time
from collections import Counter
from typing import Any

import torch
from support.peers.peers import SHAPES, SLACK_S, Line, Peer, expected, version

from rolloutmq.sync.tensors.snapshot import Snapshot
from rolloutmq.sync.transfer.order import TransferReport
from rolloutmq.worker.weights.follower import ATTEMPTS

FAULTS = {
    "SIGKILL": ("join", "rendezvous", "ready", "broadcast", "fetch", "arrived", "verify", "amid", "load", "readback"),
    "SIGSTOP": ("join", "rendezvous", "ready", "broadcast", "fetch", "verify", "amid", "load"),
    "raise": ("join", "rendezvous", "ready", "load"),
    "flip": ("arrived", "readback"),
    "lie": ("serve",),
}
WEIGHTS = (4, 1, 2, 3, 2)
"""How often each of them, in that order."""
LATER = ("broadcast", "fetch", "amid", "serve")
"""Points that are passed several times in an update."""
FAULTY = 0.3
TORN = 0.05
"""Share of updates in which a receiver fails, and in which the sender does."""
HALF = 0.5
AGAIN = 4
LARGE = {f"layer.{i}.weight": [2048, 2048] for i in range(20)} | {f"layer.{i}.norm": [2048] for i in range(20)}


class Soak:
    """Places for receivers, a spare for each, and what was seen."""

    def __init__(self, receivers: int, device: str, seed: int) -> None:
        self.dice, self.places = random.Random(seed), random.Random(seed)  # faults do not depend on who was replaced
        self.gpu = device != "cpu"
        self.source = "cuda:0" if self.gpu else "cpu"
        self.shapes, self.bucket_bytes = (LARGE, 16 << 20) if self.gpu else (SHAPES, 512)
        self.timeout_s = 5.0 if self.gpu else 1.5
        self.others = torch.cuda.device_count() - 1 if self.gpu else 0
        self.seen: Counter[str] = Counter()
        self.seconds: list[float] = []
        self.regroups: list[float] = []
        self.broken: set[Peer] = set()
        self.holds: dict[Peer, int] = {}
        self.spares = [self._start(place) for place in range(receivers)]
        self.peers = [self._start(place) for place in range(receivers)]
        self.line = Line(self.peers, timeout_s=self.timeout_s)

    def _start(self, place: int) -> Peer:
        # Without other GPUs they are on the sender's, which hands its buckets over.
        device = f"cuda:{1 + place % self.others if self.others else 0}" if self.gpu else "cpu"
        staging = self.places.choice(("on", "off"))
        self.seen[f"staging_{staging}"] += 1
        return Peer(device, staging=staging, shapes=self.shapes)

    def _replace(self, place: int) -> None:
        self.holds.pop(self.peers[place], None)
        self.peers[place].end()
        self.peers[place], self.spares[place] = self.spares[place], self._start(place)
        assert self.peers[place].hear() == "up"
        self.seen["joins"] += 1

    def update(self, number: int) -> None:
        """One version, until everybody has it. Half of them go by broadcast in a cell, at the first attempt."""
        self.line.hub._cells._cpu = not self.gpu and self.dice.random() < HALF
        snapshot = version(number, self.source, self.shapes, self.bucket_bytes)
        sent, torn = snapshot, self.dice.random() < TORN
        if torn:  # the sender ends in the midst of it
            sent = dataclasses.replace(snapshot, buckets=snapshot.buckets[: len(snapshot.buckets) // 2])
            self.seen["torn"] += 1
        elif self.dice.random() < FAULTY:
            self._break_one()
        for _ in range(AGAIN):
            behind = [peer for peer in self.peers if self.holds.get(peer) != number]
            if not behind:
                break
            self._attempt(sent, snapshot, number, behind)
            sent = snapshot
        else:
            self.seen["wrong"] += 1  # somebody never got it
        for peer in self.broken & set(self.peers):  # what it did not come to
            peer.ask(fault={"at": "", "number": 0, "how": ""})
        self.broken = set()

    def _break_one(self) -> None:
        (how,) = self.dice.choices(list(FAULTS), WEIGHTS)
        victim, at = self.dice.choice(self.peers), self.dice.choice(FAULTS[how])
        if how == "flip" and self.gpu and not self.others:  # what has arrived is the sender's own memory there
            at = "readback"
        if at == "rendezvous":
            for peer in self.peers:
                peer.ask(leave=True)
        victim.ask(fault={"at": at, "number": self.dice.randint(1, 3) if at in LATER else 1, "how": how})
        self.broken.add(victim)
        self.seen[how] += 1

    def _attempt(self, sent: Snapshot, whole: Snapshot, number: int, behind: list[Peer]) -> None:
        fresh = {peer.ask(group=True) for peer in behind} == {""}
        before = {peer: self.holds.get(peer) for peer in behind}
        began = time.monotonic()
        reports = self.line.transfer(sent, behind, timeout_s=self.timeout_s)
        self.seconds.append(time.monotonic() - began)
        self.seen["transfers"] += 1
        self.seen["hangs"] += self.seconds[-1] > ATTEMPTS * self.timeout_s + 2 * SLACK_S
        good = [report for report in reports if report is not None and report.ok]
        if fresh and len(good) == len(behind) and all(report.way == "nccl" for report in good):
            self.regroups.append(max(report.rendezvous_s for report in good))
        for peer, report in zip(behind, reports, strict=True):
            innocent = sent is whole and peer not in self.broken
            self.seen["blamed"] += innocent and (report is None or not report.ok)
            self._judge(peer, report, before[peer], whole, number)

    def _judge(self, peer: Peer, report: TransferReport | None, had: int | None, whole: Snapshot, number: int) -> None:
        """What it says is so: the new version, or the old one, bit by bit, or neither."""
        if report is None:
            self.seen["lost"] += 1
            self._replace(self.peers.index(peer))
            return
        holds = peer.ask(digests=True)
        if report.ok:
            self.holds[peer] = number
            self.seen["wrong"] += holds != expected(whole) or not report.readback
        elif not report.intact:
            self.seen["half_written"] += 1
            self.holds.pop(peer, None)
        elif had is not None:
            self.seen["refused_intact"] += 1
            old = version(had, self.source, self.shapes, self.bucket_bytes)
            self.seen["wrong"] += holds != expected(old)

    def end(self) -> None:
        self.line.close()
        for peer in (*self.peers, *self.spares):
            peer.end()


def soak(updates: int, receivers: int, device: str, seed: int = 0) -> dict[str, Any]:
    """Figures of a soak; "wrong", "hangs" and "blamed" (those that nothing happened to) must be 0."""
    began = time.monotonic()
    made = Soak(receivers, device, seed)
    try:
        for number in range(1, updates + 1):
            made.update(number)
    finally:
        made.end()
    seen = made.seen
    return {
        "updates": updates,
        "receivers": receivers,
        "device": torch.cuda.get_device_name(0) if made.gpu else "cpu",
        "torch": torch.__version__,
        "seed": seed,
        "model_mb": round(sum(2 * torch.Size(shape).numel() for shape in made.shapes.values()) / 1e6, 3),
        "transfers": seen["transfers"],
        "kills": seen["SIGKILL"],
        "stops": seen["SIGSTOP"],
        "errors": seen["raise"],
        "flips": seen["flip"],
        "lies": seen["lie"],
        "torn_sends": seen["torn"],
        "joins": seen["joins"],
        "refused_intact": seen["refused_intact"],
        "half_written": seen["half_written"],
        "staged_receivers": seen["staging_on"],
        "direct_receivers": seen["staging_off"] if made.gpu else 0,
        "wrong": seen["wrong"],
        "hangs": seen["hangs"],
        "blamed": seen["blamed"],
        "deadline_s": made.timeout_s,
        "max_seconds": round(max(made.seconds), 3),
        "median_ms": round(1e3 * statistics.median(made.seconds), 2),
        "regroup_ms": round(1e3 * statistics.median(made.regroups), 2) if made.regroups else None,
        "seconds": round(time.monotonic() - began, 1),
    }
