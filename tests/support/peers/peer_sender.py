"""An engine rank in this process that holds a version and sends it on, and the store that its worker would serve."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from support.peers.peer_process import Linear
from support.peers.peers import SHAPES, Peer

from rolloutmq.sync.disk.store import SnapshotStore
from rolloutmq.sync.receive.lend import send_held
from rolloutmq.sync.receive.receiver import Receiver
from rolloutmq.sync.tensors.snapshot import Snapshot
from rolloutmq.sync.transfer.order import TransferOrder, TransferReport
from rolloutmq.sync.wire.store import EpochKeys, serve_store

TIMEOUT_S = 20.0


def order_of(version: int, epoch: int, **more: Any) -> TransferOrder:
    base = TransferOrder(
        version=version,
        epoch=epoch,
        transport="gloo",
        host="127.0.0.1",
        port=1,
        group=f"peers-{epoch}",
        rank_offset=0,
        world_size=2,
        timeout_s=TIMEOUT_S,
        nonfinite="allow",
    )
    return replace(base, **more)


class Holder:
    """Has read its version from a snapshot."""

    def __init__(self, folder: Path, device: str = "cpu", dtype: torch.dtype = torch.bfloat16) -> None:
        self.folder = folder
        self.model = Linear(SHAPES, dtype, torch.device(device))
        self.receiver = Receiver(torch.device(device))
        self.store = serve_store("127.0.0.1")
        self.epoch = 0

    def read(self, snapshot: Snapshot) -> TransferReport:
        version = snapshot.manifest.version
        SnapshotStore(self.folder).save(snapshot)
        self.epoch += 1
        order = order_of(version, -self.epoch, transport="disk", path=str(self.folder))
        report = self.receiver.prepare(order)
        return self.receiver.commit(order.epoch, self.model) if report.ok else report

    def order(self, version: int, **more: Any) -> TransferOrder:
        self.epoch += 1
        return order_of(version, self.epoch, port=self.store.port, **more)

    def send_to(
        self, peer: Peer, version: int, *, give_up: str = "", **more: Any
    ) -> tuple[TransferReport, TransferReport | None]:
        """One transfer to `peer`: this side's report and its last one. give_up: why, before anything is sent."""
        order = self.order(version, **more)
        if give_up:
            self.store.set(EpochKeys(order.epoch).broken, give_up)
        sent: list[TransferReport] = []
        sending = Thread(target=lambda: sent.append(send_held(self.receiver, order)))
        sending.start()
        peer.say(prepare=asdict(replace(order, rank_offset=1, timeout_s=5.0 if give_up else TIMEOUT_S)))
        report = _report(peer)
        if report is not None and report.ok:
            peer.say(commit=order.epoch)
            report = _report(peer)
        sending.join()
        self.store.set(EpochKeys(order.epoch).over, "1")
        return sent[0], report


def _report(peer: Peer) -> TransferReport | None:
    answer = peer.hear(TIMEOUT_S + 5.0)
    return None if answer is None else TransferReport(**answer)
