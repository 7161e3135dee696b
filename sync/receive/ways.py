"""The ways in which a version arrives at an engine rank. Each is a class; only `way_of` chooses one.

If there is enough memory, a version is *staged*: the first half of a transfer receives and verifies all of it, and the
second half is a local copy. A transfer that fails then leaves the old weights as they were. Otherwise the second half
receives one bucket after the other, and loads each while the next one arrives. A failure may then leave the weights
half written, and the report says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ...messages.errors import TransferTimeout, WeightSyncError
from ...messages.model import Transport, WeightManifest
from ..disk import DiskVersion
from ..disk.checkpoint import Checkpoint
from ..transfer import SENDER_GONE, Phase, TransferOrder, TransferReport
from ..wire import Brief, Group, Map, Place, await_key, broadcast_key, open_handles
from .arriving import Arriving
from .from_disk import open_version
from .loading import Loading
from .pulling import Ask, asks, take
from .state import CPU, RankState


@dataclass(eq=False)
class Way:
    """One transfer at one rank. This base class has the second half for a staged version.

    The first half calls `start`, `receive` and, if staged, `verify`. The second half calls `begin`, `check` and `load`.
    `end` may be called after any of them, and `let_go` comes last. An error that they raise ends the transfer.

    deadline: of time.monotonic. buckets: flat uint8 tensors that hold the version, or a few of them that are used in
    turn. who: this rank, as the sender knows it; "" without one. place, store, group: of its cell, if it is in one.
    phase: for the report of a failure. arriving: the broadcasts, once they are queued.
    """

    transport: ClassVar[Transport] = ""
    staged: ClassVar[bool] = True
    local: ClassVar[bool] = True
    """Whether all bytes are in this process's memory after the first half."""
    early: ClassVar[bool] = False
    """Whether the first half queues broadcasts, as many as there are buffers for."""
    state: RankState
    order: TransferOrder
    deadline: float
    told: Brief
    buckets: list[torch.Tensor]
    who: str = ""
    place: Place | None = None
    store: Any = None
    group: Group | None = None
    phase: Phase = "rendezvous"
    rendezvous_s: float = 0.0
    receive_s: float = 0.0
    arriving: Arriving | None = None

    @property
    def outline(self) -> WeightManifest:
        """The layout of the version. Its digests may be another version's."""
        return self.told.outline

    @property
    def finite(self) -> bool:
        """Whether a tensor with NaN or Inf is refused."""
        return self.order.nonfinite == "refuse"

    def say_ready(self) -> None:
        """Tell the sender that this rank waits for the first bucket. Raises TransferTimeout."""
        assert self.place is not None
        try:
            self.store.set(broadcast_key(self.place.number, f"ready/{self.place.rank}"), "1")
        except RuntimeError as error:
            raise TransferTimeout(f"{SENDER_GONE}: {error}") from error

    def broken(self) -> Callable[[], str]:
        """Return a function that says why the transfer broke off; "" if it did not."""
        return self.state.lines.broken(self.order, self.store, self.place)

    def report(self, phase: Phase, **times: Any) -> TransferReport:
        """Report success up to `phase`."""
        return TransferReport(
            ok=True,
            phase=phase,
            tensors=len(self.outline.tensors),
            nbytes=self.told.nbytes,
            rendezvous_s=self.rendezvous_s,
            way=self.transport,
            holder=self.state.lines.address,
            **times,
        )

    # --- first half ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Queue the broadcasts that may begin now."""
        if self.early:
            arriving = self.arriving = self._make_arriving()
            assert self.place is not None
            if not self.place.go:
                self.say_ready()
            arriving.queue_ahead()
            self.state.early = self.told.layout

    def receive(self) -> None:
        """Receive the version, or the part of it that belongs to the first half."""

    def verify(self) -> None:
        """Compare the staged version with the trainer's digests."""
        arrival = self.state.arrival(self.told, self.buckets)
        if self.arriving is None:  # else each bucket was digested while the next one arrived
            for index in range(len(self.buckets)):
                arrival.queue(index)
        arrival.check(self.told.digests, finite=self.finite)

    # --- second half -----------------------------------------------------------------------------------------------

    def begin(self, *, at_once: bool) -> None:
        """Wait until no forward pass runs on the GPU. at_once: none does, and everything is set up."""
        self.state.synchronize()

    def check(self, loading: Loading) -> None:
        """Check everything that can be checked before the first parameter is written."""

    def load(self, loading: Loading) -> None:
        """Load the version into the model, and compare the parameters."""
        loading.load_all(self.told.digests if self.order.verify else None, converted=self.finite)
        self.state.synchronize()

    # --- at any time -----------------------------------------------------------------------------------------------

    def end(self) -> None:
        """End unfinished broadcasts, and leave their group: it is of no use for the next transfer."""
        if self.arriving is not None and not self.arriving.complete:
            self.arriving.abandon()
            self.state.lines.drop_group()

    def let_go(self) -> None:
        """Free memory that the next transfer does not need."""

    def _make_arriving(self) -> Arriving:
        assert self.group is not None
        arrival = self.state.arrival(self.told, self.buckets)
        # A bucket that is loaded as it arrives cannot be refused before. So it is checked once, in the parameters.
        twice = self.staged or not self.state.compares_all(self.told, self.buckets)
        return Arriving(
            self.group,
            arrival.buckets,
            buffers=len(self.buckets),
            streams=self.state.streams(),
            arrival=arrival if self.order.verify and twice else None,
            deadline=self.deadline,
            broken=self.broken(),
        )


class FromDisk(Way):
    """Read from a folder into host memory. Every tensor is verified as it is read."""

    transport = "disk"
    opened: DiskVersion | Checkpoint

    def receive(self) -> None:
        self.phase = "receive"
        with self.opened:
            for spec, tensor in self.opened:
                self._go_on()
                place = self.buckets[spec.bucket][spec.offset : spec.offset + spec.nbytes]
                place.copy_(tensor.reshape(-1).view(torch.uint8))

    def verify(self) -> None:
        """See Way. `receive` has verified every tensor."""

    def let_go(self) -> None:
        """See Way. No other transfer needs this host memory."""
        self.state.drop_host_memory()

    def _go_on(self) -> None:
        if why := self.state.lines.overtaken(self.order):
            raise TransferTimeout(why)
        if time.monotonic() >= self.deadline:
            raise TransferTimeout(f"{self.opened.path} could not be read in time")


class ByHandle(Way):
    """Read from the trainer's own buckets on the same GPU, by CUDA IPC."""

    transport = "ipc"
    local = False

    def receive(self) -> None:
        """See Way. All of it is here."""

    def verify(self) -> None:
        super().verify()
        # These are other buckets than the last ones, and the engine still generates.
        self.state.set_up(self.told, self.buckets)

    def let_go(self) -> None:
        """See Way. The trainer's memory is not kept open longer than needed."""
        self.state.drop_buffers()


class Pulled(Way):
    """Take it bucket by bucket from others, into host memory. Each is verified, and offered to others, as it comes.

    What an earlier attempt has verified of the same version is kept.
    """

    transport = "pull"
    ask: Ask

    def receive(self) -> None:
        self.phase, state = "receive", self.state
        take(
            state.lines,
            self.order,
            self.told.manifest,
            state.arrival(self.told, self.buckets),
            self.told.digests,
            ask=self.ask,
            deadline=self.deadline,
            here=state.already(self.told, self.buckets),
        )

    def verify(self) -> None:
        """See Way. `receive` has verified every bucket."""


class StagedAhead(Way):
    """Receive by broadcast. All broadcasts are queued at the start, and buckets are digested as they arrive."""

    early = True
    transport = "nccl"

    def receive(self) -> None:
        assert self.arriving is not None
        self.phase = "receive"
        self.arriving.settle_ahead()


class AtOnce(Way):
    """Receive during the commit. Nothing arrives before every rank is ready."""

    staged = local = False
    transport = "nccl"

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
                self.state.arrival(self.told, self.buckets).check(self.told.digests, finite=self.finite)
            unseen = self.finite and not arriving.looked_at
            loading.check(self.told.digests, finite=unseen, converted=self.finite)

    def _await_go(self) -> None:
        """Wait until all ranks are ready. A load that began before could find nothing new in its buffers."""
        assert self.place is not None
        go = broadcast_key(self.place.number, "go")
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
            self.state.synchronize()

    def check(self, loading: Loading) -> None:
        assert self.arriving is not None
        if self.order.verify and not self.arriving.looked_at and not loading.compares_all:
            raise WeightSyncError("the model is another than the last update's: nothing could be compared")


def way_of(state: RankState, order: TransferOrder, deadline: float) -> Way:
    """Join at the sender, if there is one, and choose a way. Raises WeightSyncErrors and MessageErrors."""
    if order.path:
        opened = open_version(order.path, order.version)
        try:
            read = state.told_of(opened.manifest)
            way = FromDisk(state, order, deadline, read, _whole(state, read))
        except BaseException:
            opened.close()
            raise
        way.opened = opened
        return way
    answer = state.hear(order, deadline)
    who = str(answer["who"]) if answer is not None else ""
    assert state.told is not None
    told = state.told
    if answer is not None and answer["way"] == "ipc":
        buckets = open_handles(answer["handles"], state.device, told.outline.bucket_nbytes)
        return ByHandle(state, order, deadline, told, buckets, who=who)
    if answer is not None and answer["way"] == "cell":
        return _in_cell(state, order, deadline, answer)
    pulled = Pulled(state, order, deadline, told, _whole(state, told), who=who)
    pulled.ask = asks(state.lines, order, answer, deadline)
    return pulled


def _whole(state: RankState, told: Brief) -> list[torch.Tensor]:
    buckets = state.memory[CPU].whole(told.outline.bucket_nbytes)
    assert buckets is not None  # host memory is always staged
    return buckets


def _in_cell(state: RankState, order: TransferOrder, deadline: float, answer: Map) -> Way:
    told, who, place = state.told, str(answer["who"]), Place.of(answer)
    assert told is not None
    sizes, memory = told.outline.bucket_nbytes, state.memory[state.device]
    buckets: list[Any] | None = memory.whole(sizes)
    made: type[Way]
    if buckets is not None:
        made = StagedAhead
    else:
        buckets = memory.rotating(sizes)
        # No bucket arrives before a drain is over, because the sender's GPU would wait. None arrives beside the
        # collectives of a tensor-parallel engine.
        made = AtOnceAhead if state.alone and order.mode != "drain" else AtOnce
    store = state.lines.store(order, place, deadline)
    group = state.lines.cell(order, place, store, deadline)
    return made(state, order, deadline, told, buckets, who=who, place=place, store=store, group=group)
