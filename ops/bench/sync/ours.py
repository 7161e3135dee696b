"""The sending end of RolloutMQ's own transfer, without Redis and roster. It measures the engine's part.

pool.py measures all of it, from `WeightPublisher.publish` to the commit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

import torch

from ....messages.model import UpdateMode, WeightAnnouncement
from ....sync.packing import PackedWeights
from ....sync.tensors import Snapshot
from ....sync.transfer import TransferOrder
from ....sync.wire import Broadcaster, group_for


class OursSender:
    """Sends two versions in turn that differ everywhere, so that no update finds its own bytes in place. Blocks.

    Packing and the trainer's digests are done once, here. Otherwise they are a part of `publish`, before the
    announcement. pack_s, digest_s: seconds that they took for a version.
    """

    def __init__(
        self, tensors: Callable[[bool], Iterable[tuple[str, torch.Tensor]]], *, host: str, device: str
    ) -> None:
        """tensors(flipped): returns the checkpoint, or one that differs from it everywhere."""
        self._device = torch.device(device)
        self._broadcaster = Broadcaster(host, 0)
        self._snapshots: list[Snapshot] = []
        self._last: WeightAnnouncement | None = None
        for number, flipped in enumerate((False, True)):
            began = self._now()
            packed = PackedWeights(number, tensors(flipped))
            between = self._now()
            self._snapshots.append(packed.snapshot())
            self.pack_s, self.digest_s = between - began, self._now() - between  # of the second: the first warms up
        self.buckets = len(self._snapshots[0].buckets)

    def announce(
        self, epoch: int, *, group: str, world: int, mode: UpdateMode, verify: bool, timeout_s: float
    ) -> dict[str, Any]:
        """Offer the next version. Returns the TransferOrder of the first engine, as a dictionary."""
        if self._last is not None:
            self._broadcaster.clean(self._last)
        self._broadcaster.offer(epoch, self._version(epoch))
        announcement = WeightAnnouncement(
            version=epoch,
            epoch=epoch,
            mode=mode,
            backend="nccl" if self._device.type == "cuda" else "gloo",
            verify=verify,
            host=self._broadcaster.host,
            port=self._broadcaster.store.port,
            join_timeout_s=timeout_s,
            transfer_timeout_s=timeout_s,
            roster={f"receiver-{rank}": rank for rank in range(1, world)},
            world_size=world,
            group=group_for(group, self._broadcaster.layout),
        )
        self._last = announcement
        return asdict(TransferOrder.of_announcement(announcement, 1))

    def send(self, timeout_s: float) -> None:
        """Broadcast what was announced last. Raises TransferTimeout; the next announcement needs a new group then."""
        assert self._last is not None
        self._broadcaster.send(self._version(self._last.epoch), self._last, timeout_s)

    def _version(self, epoch: int) -> Snapshot:
        snapshot = self._snapshots[epoch % 2]
        manifest = snapshot.manifest.model_copy(update={"version": epoch})
        return Snapshot(manifest, snapshot.buckets, snapshot.nonfinite)

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.monotonic()
