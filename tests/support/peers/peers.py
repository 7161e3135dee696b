"""A sender in this process and receivers in processes of their own, without Redis and without an engine."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
from support.peers import peer_process

from rolloutmq.sync.packing.packing import PackedWeights
from rolloutmq.sync.publish.hub import Hub, Outgoing
from rolloutmq.sync.publish.sender import PROBE_S
from rolloutmq.sync.tensors.snapshot import Snapshot
from rolloutmq.sync.transfer.ledger import VersionHolder
from rolloutmq.sync.transfer.order import TransferOrder, TransferReport
from rolloutmq.worker.weights.follower import ATTEMPTS, LINE_TROUBLE

TIMEOUT_S = 20.0
SLACK_S = 2.0
SHAPES = {
    "embed": [64, 8],
    "layer.qkv.left": [16, 8],
    "layer.qkv.right": [16, 8],
    "layer.norm": [8],
    "layer.down": [8, 24],
    "head": [3, 5],
}
_template = multiprocessing.get_context("forkserver")
"""Imports once; every peer is a fork of it, there in milliseconds. A fork of a process that has asked for its GPUs
could not use them: with CUDA what might ask is left to the peers."""
_template.set_forkserver_preload(
    ["rolloutmq.sync.receive.receiver", *([] if torch.backends.cuda.is_built() else ["torch._dynamo"])]
)


class Forked:
    """A process that serves what it is asked over a pipe: main(pipe, told)."""

    def __init__(self, main: Callable[[Any, dict[str, Any]], None], told: dict[str, Any]) -> None:
        self.pipe, theirs = _template.Pipe()
        self.process = _template.Process(target=main, args=(theirs, told), daemon=True)
        self.process.start()
        theirs.close()

    def say(self, **question: Any) -> None:
        self.pipe.send(question)

    def hear(self, timeout_s: float | None = None) -> Any:
        """The next answer; None if it is dead, or silent for that long."""
        try:
            return self.pipe.recv() if self.pipe.poll(timeout_s) else None
        except (EOFError, ConnectionError):
            return None

    def ask(self, **question: Any) -> Any:
        self.say(**question)
        return self.hear()

    @property
    def stopped(self) -> bool:
        """By a signal: it is there, and does nothing."""
        try:
            stat = Path(f"/proc/{self.process.pid}/stat").read_text()
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] == "T"

    def fell(self, how: str) -> bool:
        """Whether the signal that it gave itself just now, SIGKILL or SIGSTOP, has done its work."""
        if how == "SIGKILL":
            self.process.join(10.0)
        return not self.process.is_alive() if how == "SIGKILL" else self.stopped

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid or 0, number)

    def end(self) -> None:
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGKILL)
        self.process.join()
        self.pipe.close()


class Peer(Forked):
    """One receiving rank. It is on its way when this is made; its first word is "up"."""

    def __init__(
        self, device: str = "cpu", *, staging: str = "auto", shapes: dict[str, list[int]] | None = None
    ) -> None:
        told = {"device": device, "staging": staging, "shapes": shapes or SHAPES, "dtype": "bfloat16"}
        super().__init__(peer_process.main, told)
        self.device = device
        self.name = f"worker-{self.process.pid}"

    def update(self, order: TransferOrder) -> TransferReport | None:
        """Both halves, once; None if it is dead."""
        answer = self.ask(prepare=asdict(order))
        if answer is not None and answer["ok"]:
            answer = self.ask(commit=order.epoch)
        return None if answer is None else TransferReport(**answer)


@dataclass(slots=True)
class Sending:
    """A version on offer. orders: one for each receiver."""

    outgoing: Outgoing
    orders: list[TransferOrder]


class Line:
    """The sender, and its peers. cells: whether peers on a CPU are put into cells, with gloo."""

    def __init__(self, peers: Sequence[Peer] = (), *, cells: bool = False, timeout_s: float = TIMEOUT_S) -> None:
        """timeout_s: most seconds of a broadcast."""
        self.peers = list(peers)
        self.hub = Hub("127.0.0.1", 0, lambda: None, gpu_direct=True, timeout_s=timeout_s, cpu_cells=cells)
        self._epochs = itertools.count(1)
        for peer in self.peers:
            assert peer.hear() == "up"

    def begin(
        self, snapshot: Snapshot, workers: Sequence[str], *, timeout_s: float = TIMEOUT_S, **order: Any
    ) -> Sending:
        """Offer a version to receivers of these names."""
        outgoing, epoch = self.hub.offer(snapshot, frozenset(workers)), next(self._epochs)
        told = {
            "version": snapshot.manifest.version,
            "epoch": epoch,
            "address": self.hub.address,
            "token": outgoing.token,
            "digest": snapshot.manifest.fingerprint,
            "timeout_s": timeout_s,
        }
        return Sending(outgoing, [TransferOrder(**told | order, worker=worker) for worker in workers])

    def over(self, sending: Sending) -> None:
        """Offer it no more."""
        self.hub.withdraw(sending.outgoing, "the test is over")

    def transfer(
        self,
        snapshot: Snapshot,
        peers: Sequence[Peer] | None = None,
        *,
        timeout_s: float = TIMEOUT_S,
        after_prepare: bool = True,
        **order: Any,
    ) -> list[TransferReport | None]:
        """One transfer to `peers`: the reports, None of the dead and the stopped.

        Each tries again as its worker would. after_prepare: each commits as soon as its first half went well.
        """
        peers = self.peers if peers is None else list(peers)
        sending = self.begin(snapshot, [peer.name for peer in peers], timeout_s=timeout_s, **order)
        orders = dict(zip(peers, sending.orders, strict=True))
        for peer in peers:
            peer.say(prepare=asdict(orders[peer]))
        reports: dict[Peer, TransferReport | None] = {}
        tried, probed = Counter(peers), time.monotonic()
        while waits := [peer for peer in peers if peer not in reports]:
            wait([peer.pipe for peer in waits], 0.02)
            for peer in waits:
                if peer.pipe.poll():
                    answer = peer.hear()
                    report = None if answer is None else TransferReport(**answer)
                    if after_prepare and report is not None and report.phase in {"staged", "ready"}:
                        peer.say(commit=orders[peer].epoch)
                    elif report is not None and tries_again(report) and tried[peer] < ATTEMPTS:
                        tried[peer] += 1
                        peer.say(prepare=asdict(orders[peer]))
                    else:
                        reports[peer] = report
                elif peer.stopped:
                    reports[peer] = None
            if time.monotonic() - probed > PROBE_S:
                probed = time.monotonic()
                self.hub.probe([peer.name for peer in peers if (one := reports.get(peer)) is None or not one.ok])
        self.over(sending)
        return [reports[peer] for peer in peers]

    def close(self) -> None:
        """As a trainer that leaves."""
        self.hub.close()


def tries_again(report: TransferReport) -> bool:
    """Whether it failed in a way for which its worker makes another attempt."""
    return not report.ok and report.intact and report.phase in LINE_TROUBLE


def order_from(
    holders: Sequence[str], token: str, snapshot: Snapshot, worker: str = "late", timeout_s: float = TIMEOUT_S
) -> TransferOrder:
    """To take a version from those who have it at these addresses, without a trainer."""
    manifest = snapshot.manifest
    there = [VersionHolder(manifest.version, address, token) for address in holders]
    return TransferOrder.from_holders(None, there, manifest.fingerprint, worker, timeout_s=timeout_s)


@contextmanager
def line(*devices: str, cells: bool = False, timeout_s: float = TIMEOUT_S, **settings: Any) -> Iterator[Line]:
    """A sender and one peer per device."""
    peers = [Peer(device, **settings) for device in devices]
    try:
        made = Line(peers, cells=cells, timeout_s=timeout_s)
        yield made
        made.close()
    finally:
        for peer in peers:
            peer.end()


def version(
    number: int, device: str = "cpu", shapes: dict[str, list[int]] | None = None, bucket_bytes: int = 512
) -> Snapshot:
    """Random weights, different ones for every number; a few tensors to a bucket."""
    source = torch.Generator(device).manual_seed(number)
    tensors = {
        name: torch.randn(shape, generator=source, device=device).to(torch.bfloat16)
        for name, shape in (shapes or SHAPES).items()
    }
    return PackedWeights(number, tensors, bucket_bytes).snapshot()


def expected(snapshot: Snapshot) -> dict[str, str]:
    """Digests by name."""
    return {spec.name: spec.digest for spec in snapshot.manifest.tensors}
