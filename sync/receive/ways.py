"""The ways in which a version arrives at an engine rank. Each is a class; only `way_of` chooses one.

If there is enough memory, a version is *staged*: the first half of a transfer receives and verifies all of it, and the
second half is a local copy. A transfer that fails then leaves the old weights as they were. Otherwise the second half
receives one bucket after the other, and loads each while the next one arrives. A failure may then leave the weights
half written, and the report says so.
"""

from __future__ import annotations

import time
from typing import Any

from ...messages.errors import DigestMismatch, TransferTimeout, WeightSyncError
from ..disk import DiskVersion
from ..disk.checkpoint import Checkpoint
from ..transfer import TransferOrder
from ..wire import Brief, EpochKeys, Group, await_key, fetch, is_group_for, open_handles
from .arriving import Arriving
from .from_disk import open_version, read_into
from .loading import Loading
from .pending import CPU, Kept, Pending


class Way(Pending):
    """One transfer at one rank. This base class has the second half for a staged version.

    The first half calls `start`, `receive` and, if staged, `verify`. The second half calls `begin`, `check` and `load`.
    `end` may be called after any of them, and `let_go` comes last. An error that they raise ends the transfer.
    """

    staged = True
    early = False
    """Whether the first half queues broadcasts, as many as there are buffers for."""
    arriving: Arriving | None = None
    """The broadcasts, once they are queued."""

    # --- first half ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Queue the broadcasts that may begin now."""
        if self.early:
            arriving = self.arriving = self._make_arriving()
            self.say_ready()
            arriving.queue_ahead()

    def restart(self) -> bool:
        """Do what `start` does, before the version's digests are known. They are fetched while buckets arrive.

        Returns False if nobody answers at the sender's store. Another sender may listen there by now.
        """
        layout, arriving = self.told.layout, self._make_arriving()
        try:
            self.say_ready()
        except TransferTimeout:
            return False
        self.arriving = arriving
        arriving.queue_ahead()
        self.told = self.kept.hear(self.order, self.store, self.deadline)
        if self.told.layout != layout:
            raise DigestMismatch(
                f"the version's layout {self.told.layout} is not the one in its group's name {self.order.group}"
            )
        return True

    def receive(self) -> None:
        """Receive the version, or the part of it that belongs to the first half."""

    def verify(self) -> None:
        """Compare the staged version with the trainer's digests."""
        arrival = self.kept.arrival(self)
        if self.arriving is None:  # else each bucket was digested while the next one arrived
            for index in range(len(self.buckets)):
                arrival.queue(index)
        arrival.check(self.told.digests, finite=self.finite)

    # --- second half -----------------------------------------------------------------------------------------------

    def begin(self, *, at_once: bool) -> None:
        """Wait until no forward pass runs on the GPU. at_once: none does, and everything is set up."""
        self.kept.synchronize()

    def check(self, loading: Loading) -> None:
        """Check everything that can be checked before the first parameter is written."""

    def load(self, loading: Loading) -> None:
        """Load the version into the model, and compare the parameters."""
        loading.load_all(self.told.digests if self.order.verify else None, converted=self.finite)
        self.kept.synchronize()

    # --- at any time -----------------------------------------------------------------------------------------------

    def end(self) -> None:
        """End unfinished broadcasts, and leave their group: it is of no use for the next transfer."""
        if self.arriving is not None and not self.arriving.complete:
            self.arriving.abandon()
            self.kept.wire.drop_group()

    def let_go(self) -> None:
        """Free memory that the next transfer does not need."""

    def _make_arriving(self) -> Arriving:
        assert self.group is not None
        arrival = self.kept.arrival(self)
        # A bucket that is loaded as it arrives cannot be refused before. So it is checked once, in the parameters.
        twice = self.staged or not self.kept.compares_all(self)
        return Arriving(
            self.group,
            arrival.buckets,
            buffers=len(self.buckets),
            streams=self.kept.streams(),
            arrival=arrival if self.order.verify and twice else None,
            deadline=self.deadline,
            broken=self.broken(),
        )


class FromDisk(Way):
    """Read from a folder into host memory. Every tensor is verified as it is read."""

    opened: DiskVersion | Checkpoint

    def receive(self) -> None:
        self.phase = "receive"
        with self.opened:
            read_into(self.opened, self.buckets, self._go_on)

    def verify(self) -> None:
        """See Way. `receive` has verified every tensor."""

    def let_go(self) -> None:
        """See Way. No other transfer needs this host memory."""
        self.kept.drop_host_memory()

    def _go_on(self) -> None:
        if why := self.kept.wire.overtaken(self.order):
            raise TransferTimeout(why)
        if time.monotonic() >= self.deadline:
            raise TransferTimeout(f"{self.opened.path} could not be read in time")


class ByHandle(Way):
    """Read from the trainer's own buckets on the same GPU, by CUDA IPC."""

    def let_go(self) -> None:
        """See Way. The trainer's memory is not kept open longer than needed."""
        self.kept.drop_buffers()


class Staged(Way):
    """Receive over gloo, one bucket after the other."""

    def receive(self) -> None:
        assert self.group is not None
        self.phase = "receive"
        self.say_ready()
        for bucket in self.buckets:
            self.group.broadcast(bucket, self.deadline)


class StagedAhead(Way):
    """Receive over NCCL. All broadcasts are queued at the start, and buckets are digested as they arrive."""

    early = True

    def receive(self) -> None:
        assert self.arriving is not None
        self.phase = "receive"
        self.arriving.settle_ahead()


class AtOnce(Way):
    """Receive during the commit. Nothing arrives before every rank is ready."""

    staged = False

    def check(self, loading: Loading) -> None:
        self.phase = "receive"
        self.say_ready()
        self._await_go()

    def load(self, loading: Loading) -> None:
        """Check, load and read back bucket i while bucket i+1 arrives."""
        self.phase, order = "receive", self.order
        arriving = self.arriving = self.arriving or self._make_arriving()
        arriving.load(loading, readback=order.verify)
        if order.verify:
            if arriving.looked_at:
                self.kept.arrival(self).check(self.told.digests, finite=self.finite)
            unseen = self.finite and not arriving.looked_at
            loading.check(self.told.digests, finite=unseen, converted=self.finite)

    def _await_go(self) -> None:
        """Wait until all ranks are ready. A load that began before could find nothing new in its buffers."""
        go = EpochKeys(self.order.epoch).go
        await_key(self.store, go, self.deadline, self.broken(), "word that all are ready")


class AtOnceAhead(AtOnce):
    """Receive over NCCL, into an engine of one rank. The first buckets arrive before the commit."""

    early = True

    def receive(self) -> None:
        """See Way. Until the commit a thread watches the queued broadcasts."""
        assert self.arriving is not None
        self.arriving.watch()

    def begin(self, *, at_once: bool) -> None:
        assert self.arriving is not None
        self.phase = "receive"
        self.arriving.take()
        self._await_go()
        if not at_once:  # else a synchronization would wait for it without a limit
            self.arriving.settle_ahead()
        self.phase = "load"
        if not at_once:
            self.kept.synchronize()

    def check(self, loading: Loading) -> None:
        assert self.arriving is not None
        if self.order.verify and not self.arriving.looked_at and not loading.compares_all:
            raise WeightSyncError("the model is another than the last update's: nothing could be compared")


def way_of(kept: Kept, order: TransferOrder, deadline: float) -> Way:
    """Connect to the sender, fetch the manifest, and choose a way. Raises WeightSyncErrors and InvalidField."""
    if order.transport == "disk":
        opened = open_version(order.path, order.version)
        try:
            told = kept.told_of(opened.manifest)
            buckets = kept.memory[CPU].whole(told.outline.bucket_nbytes)
            assert buckets is not None  # host memory is always staged
        except BaseException:
            opened.close()
            raise
        way = FromDisk(kept, order, deadline, None, told, None, buckets)
        way.opened = opened
        return way
    store = kept.wire.store(order, deadline)
    told = kept.hear(order, store, deadline)
    if order.transport == "ipc":
        broken = kept.wire.broken(store, order)
        raw = fetch(store, EpochKeys(order.epoch).handles, deadline, broken, "handles of the trainer's buckets")
        buckets = open_handles(raw, kept.device, told.outline.bucket_nbytes)
        return ByHandle(kept, order, deadline, store, told, None, buckets)
    return _by_group(kept, order, deadline, told, (store, kept.wire.join(order, store, deadline)))


def standing_way(kept: Kept, order: TransferOrder, deadline: float) -> Way | None:
    """Choose a way without asking the sender, if this rank is still in the order's group and knows the layout.

    The version's digests are not known yet, so begin it by `restart`. Returns None if the sender must be asked.
    """
    standing, told = kept.wire.standing(order), kept.told
    if order.transport != "nccl" or standing is None or told is None or not is_group_for(order.group, told.layout):
        return None
    way = _by_group(kept, order, deadline, told, standing)
    return way if way.early else None


def _by_group(kept: Kept, order: TransferOrder, deadline: float, told: Brief, sender: tuple[Any, Group]) -> Way:
    """sender: its store, and the group with it."""
    nccl, sizes = order.transport == "nccl", told.outline.bucket_nbytes
    memory = kept.memory[kept.device if nccl else CPU]
    buckets: list[Any] | None = memory.whole(sizes)
    made: type[Way]
    if buckets is not None:
        made = StagedAhead if nccl else Staged
    else:
        buckets = memory.rotating(sizes)
        # No bucket arrives before a drain is over, because the sender's GPU would wait. None arrives beside the
        # collectives of a tensor-parallel engine.
        made = AtOnceAhead if nccl and kept.alone and order.mode != "drain" else AtOnce
    return made(kept, order, deadline, sender[0], told, sender[1], buckets)
