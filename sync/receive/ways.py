"""The ways in which a version arrives at an engine rank: one class each, chosen in `way_of` and nowhere else.

Where memory permits, a version is *staged*: the first half of a transfer receives and verifies all of it, and the
second half is a local copy. A transfer that fails then leaves the old weights as they were. Otherwise the second half
receives bucket by bucket, and loads one while the next is on its way. A failure then may leave the weights half
written, and the report says so.
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
from .layout import Loading
from .pending import CPU, Kept, Pending


class Way(Pending):
    """One transfer at one rank. This base class has the second half of a version that is staged.

    The first half calls `start`, `receive` and, where it is staged, `verify`; the second one calls `begin`, `check` and
    `load`. `end` may come after any of them, `let_go` comes last. What they raise breaks the transfer off.
    """

    staged = True
    early = False
    """Whether broadcasts are queued in the first half, as far as there are buffers."""
    arriving: Arriving | None = None
    """What is on its way."""

    # --- first half ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Have come what may come already."""
        if self.early:
            arriving = self.arriving = self._make_arriving()
            self.say_ready()
            arriving.queue_ahead()

    def restart(self) -> bool:
        """As `start`, before the version's digests are known: they are heard of while buckets come.

        False if nobody listens at the sender's store: another one may by now.
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
                f"the version does not lie as the group's name says: {self.told.layout}, {self.order.group}"
            )
        return True

    def receive(self) -> None:
        """Receive the version, as far as this belongs into the first half."""

    def verify(self) -> None:
        """Compare what was staged with the trainer's digests."""
        arrival = self.kept.arrival(self)
        if self.arriving is None:  # else it was looked at while the next bucket was on its way
            for index in range(len(self.buckets)):
                arrival.queue(index)
        arrival.check(self.told.digests, finite=self.finite)

    # --- second half -----------------------------------------------------------------------------------------------

    def begin(self, *, at_once: bool) -> None:
        """Wait until loading may begin: no forward pass runs on the GPU. at_once: none does, and all is worked out."""
        self.kept.synchronize()

    def check(self, loading: Loading) -> None:
        """The last look before the first parameter is written."""

    def load(self, loading: Loading) -> None:
        """Bring it into the model, and compare what the parameters hold."""
        loading.load_all(self.told.digests if self.order.verify else None)
        self.kept.synchronize()

    # --- at any time -----------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Nothing is left on its way. A group in the midst of a transfer is of no use for the next."""
        if self.arriving is not None and not self.arriving.complete:
            self.arriving.abandon()
            self.kept.wire.drop_group()

    def let_go(self) -> None:
        """Give back memory that is not kept for the next transfer."""

    def _make_arriving(self) -> Arriving:
        assert self.group is not None
        arrival = self.kept.arrival(self)
        # What is loaded as it comes cannot be refused before: to look once, in the parameters, is enough.
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
    """Read from a folder into host memory; every tensor is verified as it is read."""

    opened: DiskVersion | Checkpoint

    def receive(self) -> None:
        self.phase = "receive"
        with self.opened:
            read_into(self.opened, self.buckets, self._go_on)

    def verify(self) -> None:
        """See Way: it was done with every tensor that was read."""

    def let_go(self) -> None:
        """See Way: no other transfer needs this host memory."""
        self.kept.drop_host_memory()

    def _go_on(self) -> None:
        if why := self.kept.wire.overtaken(self.order):
            raise TransferTimeout(why)
        if time.monotonic() >= self.deadline:
            raise TransferTimeout(f"{self.opened.path} could not be read in time")


class ByHandle(Way):
    """The trainer's own buckets on the same GPU, opened by CUDA IPC."""

    def let_go(self) -> None:
        """See Way: another process's memory is not kept a moment longer than needed."""
        self.kept.drop_buffers()


class Staged(Way):
    """Broadcast over gloo, one bucket after the other."""

    def receive(self) -> None:
        assert self.group is not None
        self.phase = "receive"
        self.say_ready()
        for bucket in self.buckets:
            self.group.broadcast(bucket, self.deadline)


class StagedAhead(Way):
    """Broadcast over NCCL: all buckets are queued at the start, and digested as they come."""

    early = True

    def receive(self) -> None:
        assert self.arriving is not None
        self.phase = "receive"
        self.arriving.settle_ahead()


class AtOnce(Way):
    """Received by the commit: nothing comes before every rank is ready."""

    staged = False

    def check(self, loading: Loading) -> None:
        self.phase = "receive"
        self.say_ready()
        self._await_go()

    def load(self, loading: Loading) -> None:
        """The broadcast of bucket i+1 is on its way while bucket i is checked, loaded and read back."""
        self.phase, order = "receive", self.order
        arriving = self.arriving = self.arriving or self._make_arriving()
        arriving.load(loading, readback=order.verify)
        if order.verify:
            if arriving.looked_at:
                self.kept.arrival(self).check(self.told.digests, finite=self.finite)
            loading.check(self.told.digests, finite=self.finite and not arriving.looked_at)

    def _await_go(self) -> None:
        """Until all are ready: what is queued before could be left with nothing to load but what the buffers had."""
        go = EpochKeys(self.order.epoch).go
        await_key(self.store, go, self.deadline, self.broken(), "word that all are ready")


class AtOnceAhead(AtOnce):
    """Over NCCL, into an engine of one rank: the first buckets come ahead of the commit."""

    early = True

    def receive(self) -> None:
        """See Way: until the commit a thread watches what was queued."""
        assert self.arriving is not None
        self.arriving.watch()

    def begin(self, *, at_once: bool) -> None:
        assert self.arriving is not None
        self.phase = "receive"
        self.arriving.take()
        self._await_go()
        if not at_once:  # else whoever synchronizes would wait for it without an end
            self.arriving.settle_ahead()
        self.phase = "load"
        if not at_once:
            self.kept.synchronize()

    def check(self, loading: Loading) -> None:
        assert self.arriving is not None
        if self.order.verify and not self.arriving.looked_at and not loading.compares_all:
            raise WeightSyncError("the model is another than the last update's: nothing could be compared")


def way_of(kept: Kept, order: TransferOrder, deadline: float) -> Way:
    """Meet the sender, learn what comes, and choose how. Raises WeightSyncError and its kinds, InvalidField."""
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
    """As `way_of`, if this rank stands in the order's group and knows the layout: then the sender is not asked first.

    Its digests are not known yet: to be begun by `restart`.
    """
    standing, told = kept.wire.standing(order), kept.told
    if order.transport != "nccl" or standing is None or told is None or not is_group_for(order.group, told.layout):
        return None
    way = _by_group(kept, order, deadline, told, standing)
    return way if way.early else None


def _by_group(kept: Kept, order: TransferOrder, deadline: float, told: Brief, sender: tuple[Any, Group]) -> Way:
    """sender: its store and the group."""
    nccl, sizes = order.transport == "nccl", told.outline.bucket_nbytes
    memory = kept.memory[kept.device if nccl else CPU]
    buckets: list[Any] | None = memory.whole(sizes)
    made: type[Way]
    if buckets is not None:
        made = StagedAhead if nccl else Staged
    else:
        buckets = memory.rotating(sizes)
        # Buckets do not come ahead of a drain, for which the sender's GPU would wait, nor beside the collectives of a
        # tensor-parallel engine.
        made = AtOnceAhead if nccl and kept.alone and order.mode != "drain" else AtOnce
    return made(kept, order, deadline, sender[0], told, sender[1], buckets)
