"""One engine rank's side of a transfer: `prepare` while the old weights serve, `commit` between two batches.

Where memory permits, `prepare` receives and verifies the whole version, and `commit` is a local copy: a transfer that
breaks off, or brings something else than was sent, leaves the old weights as they were. Else `commit` receives bucket
by bucket, loading one while the next is on its way; what breaks off then leaves the weights half written, and the
report says so.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from ...messages.errors import DigestMismatch, TransferTimeout, WeightSyncError
from ...messages.model import StagingPolicy, WeightManifest
from ..disk import DiskVersion
from ..disk.checkpoint import Checkpoint
from ..plan import CopyPlan
from ..tensors import Staging, short_turns
from ..transfer import Phase, TransferOrder, TransferReport
from ..wire import (
    EpochKeys,
    Group,
    Told,
    Wire,
    await_key,
    fetch,
    fetch_brief,
    fetch_manifest,
    is_group_for,
    open_handles,
)
from .arriving import Arriving
from .held import Lent, open_version, read_into
from .kept import Kept
from .layout import Loading, Model
from .names import Shape, check_names, checkpoint_shapes
from .pending import Pending, say_ready
from .warm import warm_up

CPU = torch.device("cpu")


class Receiver:
    """State of one rank. `prepare` may be called from any thread, `commit` only where nothing else uses the model.

    device: where the engine's weights are. model_dir: the engine's checkpoint, to know the names that must come.
    alone: of an engine with one rank. Others serve with collectives, beside which only what is staged is received.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        rank: int = 0,
        model_dir: str = "",
        staging: StagingPolicy = "auto",
        alone: bool = True,
    ) -> None:
        self.device, self.rank, self._alone = device, rank, alone
        self._known: Mapping[str, Shape] = checkpoint_shapes(model_dir) if model_dir else {}
        self._memory = {CPU: Staging(CPU, "on"), device: Staging(device, "on" if device == CPU else staging)}
        self.wire = Wire(device, rank)
        self._pending: Pending | None = None
        self._arriving: Arriving | None = None
        self._told: Told | None = None
        self.kept = Kept(self._known)
        self._streams: tuple[Any, Any] | None = None
        self._lock = threading.Lock()
        self._held: tuple[Told, CopyPlan | None] | None = None
        self._lent = False

    # --- first half ------------------------------------------------------------------------------------------------

    def prepare(self, order: TransferOrder) -> TransferReport:
        """Join the transfer; receive and verify it if there is memory for that. Never raises.

        The report's phase is "staged" or "ready" if it went well. What an earlier `prepare` left behind is dropped.
        """
        began, self._pending, self.wire.newest = time.monotonic(), None, order
        phase: Phase = "rendezvous"
        with self._lock, self._on_device(), short_turns():
            self._end_arriving()
            try:
                warm_up(self.device)
                deadline = began + order.timeout_s
                pending = self._rejoin(order, deadline) or self._join(order, deadline)
                pending.rendezvous_s = time.monotonic() - began
                if pending.staged:
                    phase = "receive"
                    if pending.opened is not None:
                        self._read(pending.opened, pending)
                    elif pending.group is not None:
                        self._receive_all(pending)
                    pending.receive_s = time.monotonic() - began - pending.rendezvous_s
                    phase = "verify"
                    if order.verify and order.transport != "disk":  # there every tensor is verified as it is read
                        self._verify(pending)
            except Exception as error:  # whatever torch raises belongs into the report
                self._end_arriving()
                self._forget_group_after(error)
                if order.transport == "ipc":
                    self.kept.drop_buffers()
                return TransferReport(ok=False, phase=phase, error=f"{type(error).__name__}: {error}")
            if pending.arriving is not None and not pending.staged:
                pending.arriving.watch()
            self._pending = pending
        return pending.report("staged" if pending.staged else "ready", receive_s=pending.receive_s)

    def _join(self, order: TransferOrder, deadline: float) -> Pending:
        if order.transport == "disk":
            return self._open(order, deadline)
        store = self.wire.store(order, deadline)
        keys = EpochKeys(order.epoch)
        broken = self.wire.broken(store, order)
        told = self._hear(order, store, deadline, broken)
        if order.transport == "ipc":
            raw = fetch(store, keys.handles, deadline, broken, "handles of the trainer's buckets")
            buckets = open_handles(raw, self.device, told.outline.bucket_nbytes)
            return Pending(order, deadline, store, told, None, buckets, staged=True)
        pending = self._pending_in(self.wire.join(order, store, deadline), order, store, told, deadline)
        if self._early(pending):
            self._arriving = pending.arriving = self._arriving_of(pending)
            say_ready(store, order, self.rank)
            pending.arriving.queue_ahead()
        return pending

    def _rejoin(self, order: TransferOrder, deadline: float) -> Pending | None:
        """As `_join`, where group and layout are the last transfer's: ready first, and told of the digests while
        buckets come. None if it is not so, or that sender is gone."""
        standing, told = self.wire.standing(order), self._told
        if order.transport != "nccl" or standing is None or told is None or not is_group_for(order.group, told.layout):
            return None
        store, group = standing
        pending = self._pending_in(group, order, store, told, deadline)
        if not self._early(pending):
            return None
        arriving = self._arriving_of(pending)
        try:
            say_ready(store, order, self.rank)
        except TransferTimeout:  # another may listen there
            return None
        self._arriving = pending.arriving = arriving
        pending.arriving.queue_ahead()
        pending.told = self._hear(order, store, deadline, self.wire.broken(store, order))
        if pending.told.layout != told.layout:
            raise DigestMismatch(
                f"the version does not lie as the group's name says: {pending.told.layout}, {order.group}"
            )
        return pending

    def _pending_in(self, group: Group, order: TransferOrder, store: Any, told: Told, deadline: float) -> Pending:
        memory, sizes = self._memory[self.device if order.transport == "nccl" else CPU], told.outline.bucket_nbytes
        whole = memory.whole(sizes)
        rotating = [] if whole is not None else memory.rotating(sizes)
        return Pending(order, deadline, store, told, group, whole or rotating, staged=whole is not None)

    def _early(self, pending: Pending) -> bool:
        """Whether buckets are received in the first half.

        Else the sender's GPU would wait for what runs here to end, or this one's for two kinds of collectives.
        """
        order = pending.order
        return order.transport == "nccl" and (pending.staged or (self._alone and order.mode != "drain"))

    def _hear(self, order: TransferOrder, store: Any, deadline: float, broken: Callable[[], str]) -> Told:
        """What the transfer brings: in brief, if it lies as the version before."""
        brief = fetch_brief(store, order.epoch, deadline, broken)
        told = self._told.retold(brief) if self._told is not None and brief else None
        if told is None or told.version != order.version:
            told = self._told_of(fetch_manifest(store, order.epoch, order.version, deadline, broken))
        self._told = told
        return told

    def _told_of(self, manifest: WeightManifest) -> Told:
        if self._known:
            check_names({spec.name: spec.shape for spec in manifest.tensors}, self._known)
        return Told.of(manifest)

    def _open(self, order: TransferOrder, deadline: float) -> Pending:
        opened = open_version(order.path, order.version)
        try:
            told = self._told_of(opened.manifest)
            buckets = self._memory[CPU].whole(told.outline.bucket_nbytes)
            assert buckets is not None
            return Pending(order, deadline, None, told, None, buckets, staged=True, opened=opened)
        except BaseException:
            opened.close()
            raise

    def _read(self, opened: DiskVersion | Checkpoint, pending: Pending) -> None:
        def go_on() -> None:
            if why := self.wire.overtaken(pending.order):
                raise TransferTimeout(why)
            if time.monotonic() >= pending.deadline:
                raise TransferTimeout(f"{opened.path} could not be read in time")

        with opened:
            read_into(opened, pending.buckets, go_on)

    def _receive_all(self, pending: Pending) -> None:
        assert pending.group is not None
        if pending.arriving is not None:
            pending.arriving.settle_ahead()
            return
        say_ready(pending.store, pending.order, self.rank)
        for bucket in pending.buckets:
            pending.group.broadcast(bucket, pending.deadline)

    def _verify(self, pending: Pending) -> None:
        arrival = self.kept.arrival(pending)
        if pending.order.transport != "nccl":  # else it was done while the next bucket was on its way
            for index in range(len(pending.buckets)):
                arrival.queue(index)
        arrival.check(pending.told.digests, finite=pending.order.nonfinite == "refuse")

    # --- second half -----------------------------------------------------------------------------------------------

    def commit(self, epoch: int, model: Model, *, idle: bool = False) -> TransferReport:
        """Bring what `prepare` prepared into the model. Never raises.

        Must run where no forward pass can start; one that still runs on the GPU is waited for first.
        idle: for certain none does. Then buckets are loaded while those after them are on their way from the first on.
        """
        if self._lent:
            return TransferReport(ok=False, phase="load", error="the engine is sending its weights to another")
        with self._lock:
            pending, self._pending = self._pending, None
            if pending is None or pending.order.epoch != epoch:
                self._end_arriving()
                return TransferReport(ok=False, phase="load", error=f"transfer {epoch} is not prepared here")
            self._arriving = None  # ours from here on, whatever is prepared next
        began, phase, intact, loading = time.monotonic(), "load", True, None
        order, ahead = pending.order, pending.arriving if not pending.staged else None
        try:
            at_once = idle and not pending.staged and self.kept.knows(pending, model)
            if ahead is not None:
                phase = "receive"
                self._take_over(pending, ahead, settle=not at_once)
                phase = "load"
            if not at_once:
                self._synchronize()
            if time.monotonic() >= pending.deadline:  # the sender has closed it, and may have let go of its buffers
                raise TransferTimeout("the time for this transfer is over")
            loading = self.kept.loading(pending, model)
            if order.verify and ahead is not None and not ahead.looked_at and not loading.compares_all:
                raise WeightSyncError("the model is another than the last update's: nothing could be compared")
            if pending.staged:
                intact, self._held = False, None
                loading.load_all(pending.told.digests if order.verify else None)
                self._synchronize()
            else:
                phase = "receive"
                if pending.arriving is None:
                    self._await_go(pending)
                intact, self._held = False, None
                self._load_arriving(pending, loading)
        except Exception as error:  # whatever torch or the model raises belongs into the report
            self._end(ahead)
            self._forget_group_after(error)
            self.kept.drop_loading()
            return TransferReport(ok=False, phase=phase, error=f"{type(error).__name__}: {error}", intact=intact)  # type: ignore[arg-type]
        finally:
            self._let_go(pending)
        seconds = time.monotonic() - began
        if pending.order.verify:
            self._held = pending.told, self.kept.last_plan
        return pending.report(
            "done",
            receive_s=pending.receive_s if pending.staged else seconds,
            load_s=seconds,
            readback=loading.readback and pending.order.verify,
        )

    def _await_go(self, pending: Pending) -> None:
        """Until all are ready: what is queued before could be left with nothing to load but what the buffers had."""
        if pending.arriving is None:
            say_ready(pending.store, pending.order, self.rank)
        why = self.wire.broken(pending.store, pending.order)
        await_key(pending.store, EpochKeys(pending.order.epoch).go, pending.deadline, why, "word that all are ready")

    def _take_over(self, pending: Pending, ahead: Arriving, *, settle: bool) -> None:
        ahead.take()
        self._await_go(pending)
        if settle:  # else whoever synchronizes would wait for it without an end
            ahead.settle_ahead()

    def _load_arriving(self, pending: Pending, loading: Loading) -> None:
        """Broadcast of bucket i+1 while bucket i is checked, loaded and read back."""
        assert pending.group is not None
        order, arriving = pending.order, pending.arriving or self._arriving_of(pending)
        arriving.load(loading, readback=order.verify)
        if order.verify:
            finite = order.nonfinite == "refuse"
            if arriving.looked_at:
                self.kept.arrival(pending).check(pending.told.digests, finite=finite)
            loading.check(pending.told.digests, finite=finite and not arriving.looked_at)

    # --- handing it on ---------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def lending(self, version: int) -> Iterator[Lent]:
        """The version as it is held: nothing is prepared or committed inside. Raises WeightSyncError.

        A transfer that was prepared and not committed is dropped.
        """
        if not self._lock.acquire(blocking=False):
            raise WeightSyncError("the engine takes part in a transfer itself")
        try:
            self._lent, self._pending = True, None
            self._end_arriving()
            if self._held is None or self._held[0].version != version:
                raise WeightSyncError(f"the engine does not hold version {version}, received and verified")
            with self._on_device():
                told, plan = self._held
                buffers = self._memory[self.device].borrow(told.outline.bucket_nbytes)
                yield Lent(told.manifest(), plan, buffers)
        finally:
            self._lent = False
            self._lock.release()

    def forget(self, *, held: bool) -> None:
        """Let go of all buffers; and, with `held`, of what the parameters hold: something else writes them."""
        self._end_arriving()
        self._pending = None
        self.kept.drop_buffers()
        self._held = None if held else self._held
        for memory in self._memory.values():
            memory.release()

    # --- what is kept from one update to the next ------------------------------------------------------------------

    def _arriving_of(self, pending: Pending) -> Arriving:
        assert pending.group is not None
        # What is loaded as it comes cannot be refused before: to look once, in the parameters, is enough.
        twice = pending.staged or not self.kept.compares_all(pending)
        return Arriving(
            pending.group,
            self.kept.arrival(pending).buckets,
            buffers=len(pending.buckets),
            streams=self._two_streams(),
            arrival=self.kept.arrival(pending) if pending.order.verify and twice else None,
            deadline=pending.deadline,
            broken=self.wire.broken(pending.store, pending.order),
        )

    def _let_go(self, pending: Pending) -> None:
        """Another process's memory is not kept a moment longer than needed."""
        if pending.order.transport == "ipc":
            self.kept.drop_buffers()
        if pending.order.transport == "disk" and self.device != CPU:  # host memory that no other transfer needs
            self._memory[CPU] = Staging(CPU, "on")
            self.kept.drop_buffers()

    def _two_streams(self) -> tuple[Any, Any]:
        if self._streams is None:
            self._streams = torch.cuda.Stream(self.device), torch.cuda.Stream(self.device)
        return self._streams

    def _end_arriving(self) -> None:
        """Nothing is left on its way; a group in the midst of a transfer is of no use for the next."""
        arriving, self._arriving = self._arriving, None
        self._end(arriving)

    def _end(self, arriving: Arriving | None) -> None:
        if arriving is not None and not arriving.complete:
            arriving.abandon()
            self.wire.drop_group()

    def _forget_group_after(self, error: Exception) -> None:
        if not isinstance(error, DigestMismatch):
            self.wire.forget()

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _on_device(self) -> Any:
        """Threads start on GPU 0, whatever the engine's own is."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext()
