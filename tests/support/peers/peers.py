"""A sender in this process and receivers in processes of their own, without Redis and without an engine."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import wait
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from support.peers import peer_process

from rolloutmq.messages.model.weights import WeightAnnouncement
from rolloutmq.sync.packing.packing import PackedWeights
from rolloutmq.sync.tensors.snapshot import Snapshot
from rolloutmq.sync.transfer.ledger import Join
from rolloutmq.sync.transfer.order import TransferOrder, TransferReport
from rolloutmq.sync.transfer.rounds import _has_left
from rolloutmq.sync.wire.broadcaster import Broadcaster

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
        self.group = ""


@dataclass(slots=True)
class Sending:
    """A transfer under way. orders: one for each receiver."""

    announcement: WeightAnnouncement
    orders: list[TransferOrder]
    thread: Thread
    failed: list[BaseException]

    @property
    def error(self) -> BaseException | None:
        """What the sender met with, once it is done."""
        self.thread.join()
        return self.failed[0] if self.failed else None


class Line:
    """The sender, and its peers."""

    def __init__(self, peers: Sequence[Peer] = ()) -> None:
        self.peers = list(peers)
        self.broadcaster = Broadcaster("127.0.0.1", 0)
        self.epoch = 0
        for peer in self.peers:
            assert peer.hear() == "up"

    def begin(
        self, snapshot: Snapshot, groups: Sequence[str], *, timeout_s: float, nccl: bool = False, **order: Any
    ) -> Sending:
        """Start to send to receivers of one rank each. groups: the group that each is still in."""
        self.epoch += 1
        epoch, ipc = self.epoch, order.get("transport") == "ipc"
        roster = {f"w{index}": 0 if ipc else index + 1 for index in range(len(groups))}
        joins = {f"w{index}": Join(1, group=group) for index, group in enumerate(groups)}
        self.broadcaster.offer(epoch, snapshot)
        announcement = WeightAnnouncement(
            version=snapshot.manifest.version,
            epoch=epoch,
            host="127.0.0.1",
            port=self.broadcaster.store.port,
            join_timeout_s=timeout_s,
            transfer_timeout_s=timeout_s,
            roster=roster,
            world_size=1 if ipc else len(groups) + 1,
            group="" if ipc else self.broadcaster.name_group(epoch, roster, joins),
            backend="nccl" if nccl else "gloo",
        )
        orders = [
            TransferOrder(
                **{
                    "version": announcement.version,
                    "epoch": epoch,
                    "transport": announcement.backend,
                    "host": announcement.host,
                    "port": announcement.port,
                    "group": announcement.group,
                    "rank_offset": index + 1,
                    "world_size": announcement.world_size,
                    "timeout_s": timeout_s,
                }
                | order
            )
            for index in range(len(groups))
        ]
        failed: list[BaseException] = []

        def send() -> None:
            try:
                self.broadcaster.send(snapshot, announcement, timeout_s)
            except BaseException as error:
                failed.append(error)

        sending = Sending(announcement, orders, Thread(target=send), failed)
        sending.thread.start()
        return sending

    def transfer(
        self,
        snapshot: Snapshot,
        peers: Sequence[Peer] | None = None,
        *,
        timeout_s: float = 20.0,
        after_prepare: bool = True,
        **order: Any,
    ) -> tuple[list[TransferReport | None], BaseException | None, float]:
        """One transfer to `peers`: the reports (None of the dead and the stopped), the sender's error, its seconds.

        The sender hears of a death, as it does by a lease, and of a refusal; not of a stop. after_prepare: each commits
        as soon as its first half went well.
        """
        peers = self.peers if peers is None else list(peers)
        began = time.monotonic()
        nccl = snapshot.device.type == "cuda" and all(peer.device != "cpu" for peer in peers)
        groups = [peer.group for peer in peers]
        sending = self.begin(snapshot, groups, timeout_s=timeout_s, nccl=nccl, **order)
        for peer, one in zip(peers, sending.orders, strict=True):
            peer.say(prepare=asdict(one))
        reports = self._reports(peers, sending, began + timeout_s + SLACK_S, after_prepare)
        error = sending.error
        for peer, report in zip(peers, reports, strict=True):
            peer.group = sending.announcement.group if report is not None and report.ok else ""
        self.broadcaster.clean(sending.announcement)
        return reports, error, time.monotonic() - began

    def _reports(
        self, peers: Sequence[Peer], sending: Sending, until: float, after_prepare: bool
    ) -> list[TransferReport | None]:
        reports: dict[int, TransferReport | None] = {}
        while silent := {index: peer for index, peer in enumerate(peers) if index not in reports}:
            wait([peer.pipe for peer in silent.values()], 0.02)
            for index, peer in silent.items():
                if peer.pipe.poll():
                    answer = peer.hear()
                    report = None if answer is None else TransferReport(**answer)
                    if after_prepare and report is not None and report.phase in {"staged", "ready"}:
                        peer.say(commit=sending.announcement.epoch)
                        continue
                    reports[index] = report
                elif time.monotonic() > until or (peer.stopped and not sending.thread.is_alive()):
                    reports[index] = None
                else:
                    continue
                report = reports[index]
                if (report is None and not peer.stopped) or (report is not None and _has_left(report)):
                    self.broadcaster.give_up("a peer died or refused")
        return [reports[index] for index in range(len(peers))]


@contextmanager
def line(*devices: str, **settings: Any) -> Iterator[Line]:
    """A sender and one peer per device."""
    peers = [Peer(device, **settings) for device in devices]
    try:
        made = Line(peers)
        yield made
        made.broadcaster.close()
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
