"""One engine rank's side of a transfer: `prepare` while the old weights serve, `commit` between two batches.

Where memory permits, `prepare` receives and verifies the whole version, and `commit` is a local copy: a transfer that
breaks off, or brings something else than was sent, leaves the old weights as they were. Else `commit` receives bucket
by bucket, loading one while the next is on its way; what breaks off then leaves the weights half written, and the
report says so.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from ..messages.errors import DigestMismatch, TransferTimeout, WeightSyncError
from ..messages.weights import StagingPolicy, WeightManifest
from .disk_checkpoint import Checkpoint
from .disk_read import DiskVersion
from .group import Group, open_group, settle
from .held import Lent, open_version, read_into
from .ipc import open_handles
from .layout import Arrival, Loading, Model, plan_for
from .names import Shape, check_names, checkpoint_shapes
from .pending import Pending
from .plan import CopyPlan
from .rendezvous import EpochKeys, fetch, fetch_manifest, join_store, lost, why_broken
from .staging import Staging
from .stock_check import stock_report
from .transfer import Phase, TransferOrder, TransferReport
from .turns import short_turns
from .warm import warm_up

log = logging.getLogger(__name__)
CPU = torch.device("cpu")


class Receiver:
    """State of one rank. `prepare` may be called from any thread, `commit` only where nothing else uses the model.

    device: where the engine's weights are. model_dir: the engine's checkpoint, to know the names that must come.
    """

    def __init__(self, device: torch.device, *, rank: int = 0, model_dir: str = "", staging: StagingPolicy = "auto"):
        self.device, self.rank = device, rank
        self._known: Mapping[str, Shape] = checkpoint_shapes(model_dir) if model_dir else {}
        self._memory = {CPU: Staging(CPU, "on"), device: Staging(device, "on" if device == CPU else staging)}
        self._group: Group | None = None
        self._store: tuple[str, int, Any] | None = None
        self._pending: Pending | None = None
        self._arrived: tuple[Any, Arrival] | None = None
        self._loading: tuple[Arrival, Model, Loading] | None = None
        self._plan: tuple[Any, CopyPlan | None] | None = None
        self._streams: tuple[Any, Any] | None = None
        self._warm = False
        self._lock = threading.Lock()
        self._newest: TransferOrder | None = None
        self._held: tuple[WeightManifest, CopyPlan | None] | None = None
        self._lent = False

    # --- first half ------------------------------------------------------------------------------------------------

    def prepare(self, order: TransferOrder) -> TransferReport:
        """Join the transfer; receive and verify it if there is memory for that. Never raises.

        The report's phase is "staged" or "ready" if it went well. What an earlier `prepare` left behind is dropped.
        """
        began, self._pending, self._newest = time.monotonic(), None, order
        phase: Phase = "rendezvous"
        with self._lock, self._on_device(), short_turns():
            try:
                self._warm_up()
                pending = self._join(order, began + order.timeout_s)
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
                self._forget_group_after(error)
                if order.transport == "ipc":
                    self._arrived = self._loading = None
                return TransferReport(ok=False, phase=phase, error=f"{type(error).__name__}: {error}")
            self._pending = pending
        return TransferReport(
            ok=True,
            phase="staged" if pending.staged else "ready",
            tensors=len(pending.manifest.tensors),
            nbytes=pending.manifest.nbytes,
            rendezvous_s=pending.rendezvous_s,
            receive_s=pending.receive_s,
        )

    def _join(self, order: TransferOrder, deadline: float) -> Pending:
        if order.transport == "disk":
            return self._open(order, deadline)
        store = self._join_store(order, deadline)
        keys = EpochKeys(order.epoch)
        broken = self._broken(store, order)
        manifest = fetch_manifest(store, order.epoch, order.version, deadline, broken)
        if self._known:
            check_names({spec.name: spec.shape for spec in manifest.tensors}, self._known)
        if order.transport == "stock":  # SGLang receives it; see `check_stock`
            return Pending(order, deadline, store, manifest, None, [], staged=False)
        if order.transport == "ipc":
            raw = fetch(store, keys.handles, deadline, broken, "handles of the trainer's buckets")
            buckets = open_handles(raw, self.device, manifest.bucket_nbytes)
            return Pending(order, deadline, store, manifest, None, buckets, staged=True)
        group = self._join_group(order, store, deadline)
        memory = self._memory[self.device if order.transport == "nccl" else CPU]
        whole = memory.whole(manifest.bucket_nbytes)
        rotating = [] if whole is not None else memory.rotating(manifest.bucket_nbytes)
        return Pending(order, deadline, store, manifest, group, whole or rotating, staged=whole is not None)

    def _open(self, order: TransferOrder, deadline: float) -> Pending:
        opened = open_version(order.path, order.version)
        try:
            if self._known:
                check_names({spec.name: spec.shape for spec in opened.manifest.tensors}, self._known)
            buckets = self._memory[CPU].whole(opened.manifest.bucket_nbytes)
            assert buckets is not None
            return Pending(order, deadline, None, opened.manifest, None, buckets, staged=True, opened=opened)
        except BaseException:
            opened.close()
            raise

    def _read(self, opened: DiskVersion | Checkpoint, pending: Pending) -> None:
        def go_on() -> None:
            if why := self._overtaken(pending.order):
                raise TransferTimeout(why)
            if time.monotonic() >= pending.deadline:
                raise TransferTimeout(f"{opened.path} could not be read in time")

        with opened:
            read_into(opened, pending.buckets, go_on)

    def _overtaken(self, order: TransferOrder) -> str:
        """Why a transfer need not be waited for any more, seen from here."""
        return "" if self._newest is order else "another transfer goes first"

    def _broken(self, store: Any, order: TransferOrder) -> Callable[[], str]:
        there = why_broken(store, order.epoch)
        return lambda: self._overtaken(order) or there()

    def _warm_up(self) -> None:
        if not self._warm:
            warm_up(self.device)
            self._warm = True

    def _join_store(self, order: TransferOrder, deadline: float) -> Any:
        if self._store is None or self._store[:2] != (order.host, order.port) or lost(self._store[2]):
            overtaken = partial(self._overtaken, order)
            store = join_store(order.host, order.port, max(0.1, deadline - time.monotonic()), overtaken)
            self._store = order.host, order.port, store
        return self._store[2]

    def _join_group(self, order: TransferOrder, store: Any, deadline: float) -> Group:
        if self._group is None or self._group.name != order.group:
            self._drop_group()
            self._group = open_group(
                store,
                order.group,
                rank=order.rank_offset + self.rank,
                world=order.world_size,
                host=order.host,
                device=self.device if order.transport == "nccl" else CPU,
                deadline=deadline,
                broken=self._broken(store, order),
            )
        return self._group

    def _receive_all(self, pending: Pending) -> None:
        assert pending.group is not None
        if pending.order.transport != "nccl":
            pending.say_ready(self.rank)
            for bucket in pending.buckets:
                pending.group.broadcast(bucket, pending.deadline)
            return
        receiving, checking = self._two_streams()
        arrival = self._arrival(pending) if pending.order.verify else None
        pending.say_ready(self.rank)
        for index, bucket in enumerate(pending.buckets):
            # Nothing else goes on the receiving stream: one broadcast follows the other without a gap.
            with torch.cuda.stream(receiving):
                queued = pending.group.broadcast(bucket, pending.deadline)
            with torch.cuda.stream(checking):
                queued.wait()
                if arrival is not None:
                    arrival.queue(index)
        settle(pending.group, checking.record_event(), pending.deadline, self._broken(pending.store, pending.order))

    def _verify(self, pending: Pending) -> None:
        arrival = self._arrival(pending)
        if pending.order.transport != "nccl":  # else it was done while the next bucket was on its way
            for index in range(len(pending.buckets)):
                arrival.queue(index)
        arrival.check(pending.manifest, pending.expected, finite=pending.order.nonfinite == "refuse")

    # --- second half -----------------------------------------------------------------------------------------------

    def commit(self, epoch: int, model: Model) -> TransferReport:
        """Bring what `prepare` prepared into the model. Never raises.

        Must run where no forward pass can start; one that still runs on the GPU is waited for first.
        """
        if self._lent:
            return TransferReport(ok=False, phase="load", error="the engine is sending its weights to another")
        with self._lock:
            pending, self._pending = self._pending, None
        if pending is None or pending.order.epoch != epoch:
            return TransferReport(ok=False, phase="load", error=f"transfer {epoch} is not prepared here")
        began, phase, intact, loading = time.monotonic(), "load", True, None
        try:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            if time.monotonic() >= pending.deadline:  # the sender has closed it, and may have let go of its buffers
                raise TransferTimeout("the time for this transfer is over")
            loading = self._loading_of(pending, model)
            if pending.staged:
                intact, self._held = False, None
                self._load_staged(pending, loading)
            else:
                phase = "receive"
                self._await_go(pending)
                intact, self._held = False, None
                self._load_arriving(pending, loading)
        except Exception as error:  # whatever torch or the model raises belongs into the report
            self._forget_group_after(error)
            self._loading = None  # half of its work may still be queued
            return TransferReport(ok=False, phase=phase, error=f"{type(error).__name__}: {error}", intact=intact)  # type: ignore[arg-type]
        finally:
            self._let_go(pending)
        seconds = time.monotonic() - began
        if pending.order.verify:
            self._held = pending.manifest, self._plan[1] if self._plan is not None else None
        return TransferReport(
            ok=True,
            phase="done",
            tensors=len(pending.manifest.tensors),
            nbytes=pending.manifest.nbytes,
            rendezvous_s=pending.rendezvous_s,
            receive_s=pending.receive_s if pending.staged else seconds,
            load_s=seconds,
            readback=loading.readback and pending.order.verify,
        )

    def check_stock(self, epoch: int, model: Model, *, loaded: bool) -> TransferReport:
        """What there is to check around SGLang's own update: the names before it, the parameters after. Never raises.

        Must run where nothing else uses the model. What is wrong before it leaves the engine intact.
        """
        pending = self._pending
        if self._lent or pending is None or (pending.order.epoch, pending.order.transport) != (epoch, "stock"):
            return TransferReport(ok=False, phase="load", error=f"transfer {epoch} is not prepared", intact=not loaded)
        if loaded:
            self._pending = self._held = None
        report = stock_report(pending, partial(self._plan_of, pending, model), self.device, loaded=loaded)
        if loaded and report.ok and pending.order.verify:
            self._held = pending.manifest, self._plan_of(pending, model)
        return report

    def _load_staged(self, pending: Pending, loading: Loading) -> None:
        for index in range(len(pending.buckets)):
            loading.load(index)
            if pending.order.verify:
                loading.queue_readback(index)
        if pending.order.verify:
            loading.check(pending.expected)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _await_go(self, pending: Pending) -> None:
        """Until all are ready: what is queued before could be left with nothing to load but what the buffers had."""
        pending.say_ready(self.rank)
        why = self._broken(pending.store, pending.order)
        fetch(pending.store, EpochKeys(pending.order.epoch).go, pending.deadline, why, "word that all are ready")

    def _load_arriving(self, pending: Pending, loading: Loading) -> None:
        """Broadcast of bucket i+1 while bucket i is checked, loaded and read back; nothing waits on the host."""
        assert pending.group is not None
        order, buffers, sizes = pending.order, pending.buckets, pending.manifest.bucket_nbytes
        receiving, working = self._two_streams()
        arrival = self._arrival(pending)
        free: list[Any] = [None] * len(buffers)
        for index, size in enumerate(sizes):
            turn = index % len(buffers)
            if free[turn] is not None:
                receiving.wait_event(free[turn])
            with torch.cuda.stream(receiving):
                queued = pending.group.broadcast(buffers[turn][:size], pending.deadline)
            with torch.cuda.stream(working):
                queued.wait()
                if order.verify:
                    arrival.queue(index)
                loading.load(index)
                if order.verify:
                    loading.queue_readback(index)
                free[turn] = working.record_event()
        settle(pending.group, working.record_event(), pending.deadline, self._broken(pending.store, pending.order))
        if order.verify:
            arrival.check(pending.manifest, pending.expected, finite=order.nonfinite == "refuse")
            loading.check(pending.expected)

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
            if self._held is None or self._held[0].version != version:
                raise WeightSyncError(f"the engine does not hold version {version}, received and verified")
            with self._on_device():
                buffers = self._memory[self.device].borrow(self._held[0].bucket_nbytes)
                yield Lent(*self._held, buffers)
        finally:
            self._lent = False
            self._lock.release()

    def forget(self, *, held: bool) -> None:
        """Let go of all buffers; and, with `held`, of what the parameters hold: something else writes them."""
        self._pending = self._arrived = self._loading = None
        self._held = None if held else self._held
        for memory in self._memory.values():
            memory.release()

    # --- what is kept from one update to the next ------------------------------------------------------------------

    def _bucket_views(self, pending: Pending) -> list[torch.Tensor]:
        """One tensor for each bucket of the manifest: where it is, or will be when its turn has come."""
        sizes, buckets = pending.manifest.bucket_nbytes, pending.buckets
        return [buckets[index % len(buckets)][:size] for index, size in enumerate(sizes)]

    def _arrival(self, pending: Pending) -> Arrival:
        key = pending.layout, tuple(bucket.data_ptr() for bucket in pending.buckets)
        if self._arrived is None or self._arrived[0] != key:
            self._arrived = key, Arrival(pending.manifest, self._bucket_views(pending))
        return self._arrived[1]

    def _loading_of(self, pending: Pending, model: Model) -> Loading:
        arrival = self._arrival(pending)
        if self._loading is None or self._loading[0] is not arrival or self._loading[1] is not model:
            plan = self._plan_of(pending, model)
            self._loading = arrival, model, Loading(model, plan, self._bucket_views(pending), arrival)
        return self._loading[2]

    def _plan_of(self, pending: Pending, model: Model) -> CopyPlan | None:
        key = pending.layout, id(model)
        if self._plan is None or self._plan[0] != key:
            before = self._plan is not None and self._plan[1] is not None
            self._plan = key, plan_for(model, pending.manifest, frozenset(self._known), must=before)
        return self._plan[1]

    def _let_go(self, pending: Pending) -> None:
        """Another process's memory is not kept a moment longer than needed."""
        if pending.order.transport == "ipc":
            self._arrived = self._loading = None
        if pending.order.transport == "disk" and self.device != CPU:  # host memory that no other transfer needs
            self._memory[CPU] = Staging(CPU, "on")
            self._arrived = self._loading = None

    def _two_streams(self) -> tuple[Any, Any]:
        if self._streams is None:
            self._streams = torch.cuda.Stream(self.device), torch.cuda.Stream(self.device)
        for stream in self._streams:
            stream.wait_stream(torch.cuda.default_stream(self.device))
        return self._streams

    def _forget_group_after(self, error: Exception) -> None:
        if not isinstance(error, DigestMismatch):
            self._drop_group()
            self._store = None

    def _drop_group(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.abort()

    def _on_device(self) -> Any:
        """Threads start on GPU 0, whatever the engine's own is."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext()
