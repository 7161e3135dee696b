"""The sender's end: one rendezvous store, one process group that is kept between transfers, one transfer at a time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from threading import Event
from typing import Any, Protocol

import torch

from ...messages.codec import encode
from ...messages.errors import TransferTimeout
from ...messages.model import WeightAnnouncement, WeightManifest
from ..tensors import Snapshot, Staging, short_turns
from ..transfer import Join
from .brief import Brief, group_for, is_group_for
from .group import Group, Queued, await_broadcasts, here, open_group
from .ipc import export_handles
from .quiet import quiet_torch
from .store import EpochKeys, serve_store

log = logging.getLogger(__name__)
CPU = torch.device("cpu")


class Sendable(Protocol):
    """A version that can be sent: a Snapshot, or one whose buckets are filled when they are sent.

    rotation: the memory of a bucket is filled again this many buckets later. 0: never.
    """

    @property
    def manifest(self) -> WeightManifest: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def rotation(self) -> int: ...
    @property
    def buckets(self) -> Iterable[torch.Tensor]: ...


class Broadcaster:
    """Sends versions from one process. One thread at a time may call its methods, and any thread `give_up`."""

    def __init__(self, host: str, port: int, store: Any = None) -> None:
        """host, port: where it serves a rendezvous store. store: a connection to another process's store, instead."""
        self.store: Any = store or serve_store(host, port)
        self.host = host
        self._group: Group | None = None
        self._members: dict[str, int] = {}
        self._groups = 0
        self.absent: frozenset[int] = frozenset()
        """The ranks that the last `send` waited for until its deadline."""
        self.layout = ""
        """Name of the last published version's layout; see brief.py."""
        self.sent_bytes = 0
        """Bytes of the transfer under way that the transport has been given."""
        self._newest, self._most_ranks = 0, 1
        self._stopped = Event()
        self._why = ""
        self._stream: Any = None
        self._staging: Staging | None = None

    def close(self) -> None:
        """Leave the group."""
        self._drop_group()
        self.store = None

    # --- before the seal -------------------------------------------------------------------------------------------

    def offer(self, epoch: int, snapshot: Snapshot) -> None:
        """Begin a transfer: delete the last one's keys, and publish the manifest."""
        self._stopped.clear()
        self.sent_bytes = 0
        # After Redis has lost its data the numbers of transfers start again. This store still has the old keys.
        keys = EpochKeys(epoch)
        said = [] if epoch > self._newest else [keys.ready(rank) for rank in range(1, self._most_ranks)]
        for key in (keys.broken, keys.go, *said):
            self.store.delete_key(key)
        self._newest = epoch
        self.publish(epoch, snapshot.manifest)

    def publish(self, epoch: int, manifest: WeightManifest) -> None:
        """Put the manifest into the store. Receivers wait for it."""
        told = Brief.of(manifest)
        self.layout = told.layout
        self.store.set(EpochKeys(epoch).brief, told.to_bytes())
        self.store.set(EpochKeys(epoch).manifest, encode(manifest))

    def name_group(self, epoch: int, roster: Mapping[str, int], joins: Mapping[str, Join]) -> str:
        """Return the name of this transfer's group.

        It is the last one's, if layout and members are the same and all of them are still in it.
        """
        if self._group is not None and self._members == dict(roster):
            name = self._group.name
            if is_group_for(name, self.layout) and all(joins[worker].group == name for worker in roster):
                return name
        self._drop_group()
        self._members = dict(roster)
        self._groups += 1
        return group_for(f"group-{epoch}-{self._groups}", self.layout)

    # --- after it --------------------------------------------------------------------------------------------------

    def send(self, snapshot: Sendable, announcement: WeightAnnouncement, timeout_s: float) -> None:
        """Send every bucket to the announcement's group. Blocks. Raises TransferTimeout, also after `give_up`."""
        keys = EpochKeys(announcement.epoch)
        deadline, self.absent = time.monotonic() + timeout_s, frozenset()
        self._most_ranks = max(self._most_ranks, announcement.world_size)
        try:
            # Engines may stand still until the last bucket, so the training loop must not keep the interpreter for
            # long.
            with quiet_torch(), short_turns():
                if 0 in announcement.roster.values():
                    self.store.set(keys.handles, export_handles(tuple(snapshot.buckets)))
                if announcement.world_size > 1:
                    self._send_to_group(snapshot, announcement, deadline)
        except Exception as error:
            if time.monotonic() >= deadline:
                self.absent = self._absent(announcement)
            self.store.set(keys.broken, str(error)[:500])
            self._drop_group()
            raise

    def give_up(self, why: str) -> None:
        """End the `send` under way. It is called from another thread."""
        self._why = why
        self._stopped.set()

    def clean(self, announcement: WeightAnnouncement) -> None:
        """Delete the keys of a transfer that is over."""
        keys = EpochKeys(announcement.epoch)
        ready = [keys.ready(rank) for rank in range(1, announcement.world_size)]
        for key in (keys.brief, keys.manifest, keys.handles, keys.go, *ready):
            self.store.delete_key(key)

    def _send_to_group(self, snapshot: Sendable, announcement: WeightAnnouncement, deadline: float) -> None:
        device = _device_of(snapshot) if announcement.backend == "nccl" else CPU
        if self._group is None:
            self._group = open_group(
                self.store,
                announcement.group,
                rank=0,
                world=announcement.world_size,
                host=self.host,
                device=device,
                deadline=deadline,
                broken=self._broken,
            )
        self._await_ready(announcement, deadline)
        self._check()
        go = partial(self.store.set, EpochKeys(announcement.epoch).go, "1")
        if device.type == "cuda":
            self._send_from_gpu(self._group, snapshot, device, deadline, go)
            return
        go()
        for bucket in snapshot.buckets:
            self._check()
            self._group.broadcast(bucket.cpu(), deadline)
            self.sent_bytes += bucket.numel()

    def _send_from_gpu(
        self, group: Group, snapshot: Sendable, device: torch.device, deadline: float, go: Callable[[], object]
    ) -> None:
        """go: tells receivers that they may overwrite the weights that they have."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        buffers: list[torch.Tensor] = []
        if snapshot.device.type == "cpu":
            self._staging = self._staging or Staging(device, "off")
            buffers = self._staging.rotating(snapshot.manifest.bucket_nbytes)
        queued: list[Queued] = []
        with torch.cuda.device(device), torch.cuda.stream(self._stream):
            for index, bucket in enumerate(snapshot.buckets):
                source = bucket
                if bucket.device.type == "cpu":
                    if index >= len(buffers):
                        queued[index - len(buffers)].wait()  # the buffer's last broadcast
                    source = buffers[index % len(buffers)][: bucket.numel()]
                    source.copy_(bucket, non_blocking=True)
                queued.append(group.broadcast(source, deadline))
                self.sent_bytes += source.numel()
                if index == 0:  # after the first broadcast is queued: everybody waits for the wire
                    go()
                if 0 < snapshot.rotation <= len(queued):
                    queued[-snapshot.rotation].wait()
            for each in queued[-1:]:
                each.wait()
            await_broadcasts(group, self._stream.record_event(), deadline, self._broken)

    def _await_ready(self, announcement: WeightAnnouncement, deadline: float) -> None:
        """Wait until every receiver has its buffers. A broadcast that waits for a receiver would keep this GPU busy."""
        keys = EpochKeys(announcement.epoch)
        missing = [keys.ready(rank) for rank in range(1, announcement.world_size)]
        pause = 0.00005  # seconds; the transfer of a small model takes a few milliseconds
        while True:
            missing = [key for key in missing if not self.store.check([key])]
            if not missing:
                return
            self._check()
            if time.monotonic() >= deadline:
                raise TransferTimeout(
                    f"{len(missing)} of {announcement.world_size - 1} receivers were not ready in time"
                )
            time.sleep(pause)
            pause = min(pause * 1.02, 0.02)

    def _absent(self, announcement: WeightAnnouncement) -> frozenset[int]:
        """Return the ranks that did not come to make the group or, once it is made, were not ready to receive.

        Empty if all came and the group could not be made: one of them broke off, and nothing tells which.
        """
        keys, ranks = EpochKeys(announcement.epoch), range(1, announcement.world_size)
        away = frozenset(rank for rank in ranks if not self.store.check([here(announcement.group, rank)]))
        if away or self._group is None:
            return away
        return frozenset(rank for rank in ranks if not self.store.check([keys.ready(rank)]))

    def _broken(self) -> str:
        return self._why or "the transfer was given up" if self._stopped.is_set() else ""

    def _check(self) -> None:
        if why := self._broken():
            raise TransferTimeout(f"transfer broken off: {why}")

    def _drop_group(self) -> None:
        group, self._group, self._members = self._group, None, {}
        if group is not None:
            group.abort()


def _device_of(snapshot: Sendable) -> torch.device:
    """Return the GPU that a snapshot is sent from: its own, or the current one for a copy in host memory."""
    if snapshot.device.type == "cuda":
        return snapshot.device
    return torch.device("cuda", torch.cuda.current_device())
