"""The sending end of RolloutMQ's own transfer, without Redis. It measures the engine's part.

pool.py measures all of it, from `WeightPublisher.publish` to the commit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from threading import Event
from typing import Any

import torch

from rolloutmq.messages.errors import TransferTimeout
from rolloutmq.messages.model import UpdateMode
from rolloutmq.sync.packing import PackedWeights
from rolloutmq.sync.publish import Hub, Outgoing
from rolloutmq.sync.tensors import Snapshot
from rolloutmq.sync.transfer import TransferOrder

GLANCE_S = 0.2


class OursSender:
    """Sends two versions in turn that differ everywhere, so that no update finds its own bytes in place. Blocks.

    Packing and the trainer's digests are done once, here. Otherwise they are a part of `publish`, before the
    announcement. pack_s, digest_s: seconds that they took for a version.
    """

    def __init__(
        self, tensors: Callable[[bool], Iterable[tuple[str, torch.Tensor]]], *, host: str, device: str, timeout_s: float
    ) -> None:
        """tensors(flipped): returns the checkpoint, or one that differs from it everywhere."""
        self._device = torch.device(device)
        self._news = Event()
        self._hub = Hub(host, 0, self._news.set, gpu_direct=True, timeout_s=timeout_s)
        self._snapshots: list[Snapshot] = []
        self._last: Outgoing | None = None
        for number, flipped in enumerate((False, True)):
            began = self._now()
            packed = PackedWeights(number, tensors(flipped))
            between = self._now()
            self._snapshots.append(packed.snapshot())
            self.pack_s, self.digest_s = between - began, self._now() - between  # of the second: the first warms up
        self.buckets = len(self._snapshots[0].buckets)

    def announce(
        self, epoch: int, *, workers: list[str], mode: UpdateMode, verify: bool, timeout_s: float
    ) -> dict[str, Any]:
        """Offer the next version. Returns the TransferOrder of the engines, as a dictionary, without their ids."""
        if self._last is not None:
            self._hub.withdraw(self._last, "the next round begins")
        snapshot = self._snapshots[epoch % 2]
        manifest = snapshot.manifest.model_copy(update={"version": epoch})
        offered = Snapshot(manifest, snapshot.buckets, snapshot.nonfinite)
        self._last = self._hub.offer(offered, frozenset(workers))
        return asdict(
            TransferOrder(
                version=epoch,
                epoch=epoch,
                address=self._hub.address,
                token=self._last.token,
                digest="",
                worker="",
                timeout_s=timeout_s,
                mode=mode,
                verify=verify,
                drain_s=timeout_s,
            )
        )

    def send(self, workers: list[str], timeout_s: float) -> None:
        """Wait until all of them have what was announced last. Raises TransferTimeout."""
        assert self._last is not None
        deadline = time.monotonic() + timeout_s
        while set(workers) - self._last.joined or self._last.receiving:
            self._news.clear()
            if lost := [worker for worker in workers if self._hub.lost(worker)[0]]:
                raise TransferTimeout(f"{lost[0]}: {self._hub.lost(lost[0])[0]}")
            if time.monotonic() >= deadline:
                raise TransferTimeout(f"{sorted(self._last.receiving)} did not receive it in time")
            self._news.wait(GLANCE_S)

    def close(self) -> None:
        """Give the versions' memory back."""
        self._hub.close()
        self._last = None
        self._snapshots.clear()

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.monotonic()
