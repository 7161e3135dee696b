"""A transfer between its two halves, and what an engine rank keeps from one transfer to the next."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from ...messages.errors import TransferTimeout
from ...messages.model import StagingPolicy, WeightManifest
from ..plan import CopyPlan
from ..tensors import Copies, Digester, Staging
from ..transfer import Phase, TransferOrder, TransferReport
from ..wire import Brief, EpochKeys, Group, Wire, fetch_brief, fetch_manifest
from .layout import Arrival, Loading, Model, Shape, bucket_views, check_names, plan_for

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Lent:
    """A verified version that does not change for a while. plan: where its tensors are, if that is known.

    buffers: to pack it into, flat uint8, each as long as the largest bucket.
    """

    manifest: WeightManifest
    plan: CopyPlan | None
    buffers: Sequence[torch.Tensor]


@dataclass(eq=False)
class Pending:
    """A transfer that this rank takes part in.

    deadline: of time.monotonic. store: the connection to the sender's. group: None where none is needed. buckets: flat
    uint8 tensors that hold the version, or a few to receive it into in turn. phase: where it is, for the report of a
    failure.
    """

    kept: Kept
    order: TransferOrder
    deadline: float
    store: Any
    told: Brief
    group: Group | None
    buckets: list[torch.Tensor]
    phase: Phase = "rendezvous"
    rendezvous_s: float = 0.0
    receive_s: float = 0.0

    @property
    def outline(self) -> WeightManifest:
        """How the version lies in its buckets; the digests in it may be another version's."""
        return self.told.outline

    @property
    def finite(self) -> bool:
        """Whether a tensor with NaN or Inf is refused."""
        return self.order.nonfinite == "refuse"

    def say_ready(self) -> None:
        """Tell the sender that this rank waits for the first bucket. Raises TransferTimeout."""
        try:
            self.store.set(EpochKeys(self.order.epoch).ready(self.order.rank_offset + self.kept.rank), "1")
        except RuntimeError as error:
            raise TransferTimeout(f"the sender is gone: {error}") from error

    def broken(self) -> Callable[[], str]:
        """Asks why the transfer broke off; "" if it did not."""
        return self.kept.wire.broken(self.store, self.order)

    def report(self, phase: Phase, **times: Any) -> TransferReport:
        """The report of a transfer that went well up to `phase`."""
        return TransferReport(
            ok=True,
            phase=phase,
            tensors=len(self.outline.tensors),
            nbytes=self.told.nbytes,
            rendezvous_s=self.rendezvous_s,
            **times,
        )


class Kept:
    """Connections, memory, and what was worked out for the buffers, the layout and the model that were seen last.

    memory: where versions are received, by device. told: the version that was announced last.
    """

    def __init__(
        self, device: torch.device, rank: int, known: Mapping[str, Shape], staging: StagingPolicy, *, alone: bool
    ) -> None:
        """See Receiver. known: shapes in the engine's checkpoint, by name; none if they are not known."""
        self.device, self.rank, self.alone, self._known = device, rank, alone, known
        self.wire = Wire(device, rank)
        self.memory = {CPU: Staging(CPU, "on")}
        self.told: Brief | None = None
        self._streams: tuple[Any, Any] | None = None
        self._arrival: tuple[Any, Arrival] | None = None
        self._loading: tuple[Arrival, Model, Loading] | None = None
        self._plan: tuple[Any, CopyPlan | None] | None = None
        self.stage(staging)

    # --- what a transfer brings ------------------------------------------------------------------------------------

    def hear(self, order: TransferOrder, store: Any, deadline: float) -> Brief:
        """What the transfer brings: in brief, if it lies as the version before."""
        broken = self.wire.broken(store, order)
        brief = fetch_brief(store, order.epoch, deadline, broken)
        told = self.told.updated(brief) if self.told is not None and brief else None
        if told is None or told.version != order.version:
            told = self.told_of(fetch_manifest(store, order.epoch, order.version, deadline, broken))
        self.told = told
        return told

    def told_of(self, manifest: WeightManifest) -> Brief:
        """Raises DigestMismatch for tensors that are not the model's."""
        if self._known:
            check_names({spec.name: spec.shape for spec in manifest.tensors}, self._known)
        return Brief.of(manifest)

    # --- memory and streams ----------------------------------------------------------------------------------------

    def stage(self, policy: StagingPolicy) -> None:
        """From now on receive a version beside the one that serves, or not; host memory is always staged."""
        if self.device != CPU:
            self.memory[self.device] = Staging(self.device, policy)
            self.drop_buffers()

    def drop_host_memory(self) -> None:
        """Let go of staged host memory, where the engine is on a GPU and no other transfer needs it."""
        if self.device != CPU:
            self.memory[CPU].release()
            self.drop_buffers()

    def streams(self) -> tuple[Any, Any]:
        """torch.cuda.Streams, to receive on and to work on."""
        if self._streams is None:
            self._streams = torch.cuda.Stream(self.device), torch.cuda.Stream(self.device)
        return self._streams

    def synchronize(self) -> None:
        """Wait until the device has done everything that was queued."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def on_device(self) -> Any:
        """A context in which the engine's GPU is the current one: threads start on GPU 0."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext()

    # --- worked out once -------------------------------------------------------------------------------------------

    def arrival(self, pending: Pending) -> Arrival:
        """Checks of what arrives in these buffers."""
        key = pending.told.layout, tuple(bucket.data_ptr() for bucket in pending.buckets)
        if self._arrival is None or self._arrival[0] != key:
            self._arrival = key, Arrival(pending.outline, bucket_views(pending.outline, pending.buckets))
        return self._arrival[1]

    def knows(self, pending: Pending, model: Model) -> bool:
        """Whether there is nothing to work out any more."""
        return self._loading is not None and self._loading[:2] == (self.arrival(pending), model)

    def compares_all(self, pending: Pending) -> bool:
        """Whether these buffers were loaded before, and every tensor of them compared in the parameters then."""
        loading = self._loading
        return loading is not None and loading[0] is self.arrival(pending) and loading[2].compares_all

    def loading(self, pending: Pending, model: Model) -> Loading:
        """From these buffers into the model. Raises what `plan_for` raises."""
        arrival = self.arrival(pending)
        if self._loading is None or not self.knows(pending, model):
            self._loading = arrival, model, Loading(model, self._plan_of(pending, model), arrival)
        return self._loading[2]

    def _plan_of(self, pending: Pending, model: Model) -> CopyPlan | None:
        key = pending.told.layout, id(model)
        if self._plan is None or self._plan[0] != key:
            before = self._plan is not None and self._plan[1] is not None
            self._plan = key, plan_for(model, pending.outline, frozenset(self._known), must=before)
        return self._plan[1]

    @property
    def last_plan(self) -> CopyPlan | None:
        """The copy plan of the last loading, if it could be recorded."""
        return self._plan[1] if self._plan is not None else None

    def drop_loading(self) -> None:
        """Half of its work may still be queued."""
        self._loading = None

    def drop_buffers(self) -> None:
        """Let go of the buffers."""
        self._arrival = self._loading = None


@cache
def warm_up(device: torch.device) -> None:
    """Do once in a process what is slow the first time, while the old weights serve."""
    importlib.import_module("torch._dynamo")  # seconds; torch wants it when the first copy plan is recorded
    if device.type == "cuda":  # compiles the kernels
        sample = torch.zeros(1 << 20, dtype=torch.bfloat16, device=device)
        found, bad = torch.zeros(1, dtype=torch.int64, device=device), torch.zeros(1, dtype=torch.int32)
        Digester([sample]).run(found)
        Digester([sample]).run(found, bad.to(device))
        Copies([(torch.empty_like(sample), sample)], often=True).run()
