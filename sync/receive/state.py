"""What an engine rank keeps from one transfer to the next: connections, memory, and what is set up once."""

from __future__ import annotations

import contextlib
import importlib
from functools import cache
from typing import Any

import torch

from ...messages.errors import MalformedMessage, TransferTimeout
from ...messages.model import StagingPolicy, WeightManifest
from ..plan import CopyPlan
from ..tensors import Copies, Digester, Staging
from ..transfer import TransferOrder
from ..wire import Brief, Lines, Map, fetch_manifest, gpu_id, nccl_settings
from .compatibility import check_names
from .loading import Known, Loading, Model, plan_for
from .verify import Arrival

CPU = torch.device("cpu")


class RankState:
    """Connections, memory, and the checks and copies for the last buffers, layout and model.

    memory: device -> memory that receives versions. told: the version that was announced last. early: the layout for
    which there are buffers that broadcasts may begin to fill; "" for none.
    """

    def __init__(self, device: torch.device, rank: int, ranks: int, known: Known, staging: StagingPolicy) -> None:
        """known: of the engine's checkpoint. Receiver describes the others."""
        self.device, self.alone, self._known = device, ranks == 1, known
        self.lines = Lines(device, rank, ranks)
        self.memory = {CPU: Staging(CPU, "on")}
        self.told: Brief | None = None
        self.early = ""
        self._streams: tuple[Any, Any] | None = None
        self._arrival: tuple[Any, Arrival] | None = None
        self._loading: tuple[Arrival, Model, Loading] | None = None
        self._plan: tuple[Any, CopyPlan | None] | None = None
        self._model: Model | None = None  # the last one
        self._verified: tuple[Any, set[int]] | None = None
        self.stage(staging)

    # --- the announced version -------------------------------------------------------------------------------------

    def hear(self, order: TransferOrder, deadline: float) -> Map | None:
        """Join at the order's sender, if it has one, and return its answer. `told` is the order's version then.

        Of that only digests are fetched if the layout is known. Raises TransferTimeout, and MalformedMessage for an
        answer that is none.
        """
        if not order.address:
            self.told = self.told_of(fetch_manifest(order)[0])
            return None
        cuda = self.device.type == "cuda"
        try:
            answer = self.lines.join(
                order, deadline, cuda=cuda, gpu=gpu_id(self.device), nccl=nccl_settings(), ready=self._ready_for(order)
            )
        except TransferTimeout:  # a trainer that is gone: others have the version
            if not order.holders:
                raise
            self.told = self.told_of(fetch_manifest(order)[0])
            return None
        brief = answer.get("brief")
        if not isinstance(brief, bytes) or not {"who", "way"} <= answer.keys():
            raise MalformedMessage(f"the sender's answer has {sorted(map(str, answer))[:8]}: brief, who, way expected")
        told = self.told.updated(brief) if self.told is not None else None
        if told is None or told.version != order.version:
            told = self.told_of(fetch_manifest(order)[0])
        self.told = told
        return answer

    def _ready_for(self, order: TransferOrder) -> str:
        """The layout that a broadcast may begin with as soon as this rank has joined; "" for none."""
        here = self.told is not None and self.lines.group is not None and order.mode != "drain"
        return self.early if here and self.told is not None and self.early == self.told.layout else ""

    def already(self, told: Brief, buckets: list[torch.Tensor]) -> set[int]:
        """Return the buckets that an earlier attempt has received and verified, to be kept up to date."""
        key = told.layout, tuple(told.digests.tolist()), buckets[0].data_ptr() if buckets else 0
        if self._verified is None or self._verified[0] != key:
            self._verified = key, set()
        return self._verified[1]

    def overwritten(self) -> None:
        """Forget what earlier attempts have received: the memory is used for something else."""
        self._verified = None

    def told_of(self, manifest: WeightManifest) -> Brief:
        """Check a manifest's names. Raises DigestMismatch for tensors that are not the model's."""
        if self._known:
            expected = {name: shape for name, (_, shape) in self._known.items()}
            check_names({spec.name: spec.shape for spec in manifest.tensors}, expected)
        return Brief.of(manifest)

    # --- memory and streams ----------------------------------------------------------------------------------------

    def stage(self, policy: StagingPolicy) -> None:
        """Set whether GPU memory receives a version beside the one that serves. Host memory always does."""
        if self.device != CPU:
            self.memory[self.device] = Staging(self.device, policy)
            self.drop_buffers()

    def drop_host_memory(self) -> None:
        """Free staged host memory if the engine is on a GPU: other transfers do not need it."""
        if self.device != CPU:
            self.memory[CPU].release()
            self.overwritten()
            self.drop_buffers()

    def streams(self) -> tuple[Any, Any]:
        """torch.cuda.Streams, to receive on and to work on."""
        if self._streams is None:
            self._streams = torch.cuda.Stream(self.device), torch.cuda.Stream(self.device)
        return self._streams

    def synchronize(self) -> None:
        """Wait until the device has finished everything that was queued."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def on_device(self) -> Any:
        """Return a context in which the engine's GPU is the current one. Threads start on GPU 0."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext()

    # --- set up once per layout ------------------------------------------------------------------------------------

    def arrival(self, told: Brief, buckets: list[torch.Tensor]) -> Arrival:
        """Return the checks of tensors that arrive in these buffers."""
        key = told.layout, tuple(bucket.data_ptr() for bucket in buckets)
        if self._arrival is None or self._arrival[0] != key:
            places = enumerate(told.outline.bucket_nbytes)
            views = [buckets[index % len(buckets)][:size] for index, size in places]
            self._arrival = key, Arrival(told.outline, views)
        return self._arrival[1]

    def knows(self, told: Brief, buckets: list[torch.Tensor], model: Model) -> bool:
        """Whether everything is set up for these buffers and this model."""
        return self._loading is not None and self._loading[:2] == (self.arrival(told, buckets), model)

    def compares_all(self, told: Brief, buckets: list[torch.Tensor]) -> bool:
        """Whether these buffers were loaded before, and every tensor was then compared in the parameters."""
        loading = self._loading
        return loading is not None and loading[0] is self.arrival(told, buckets) and loading[2].compares_all

    def loading(self, told: Brief, buckets: list[torch.Tensor], model: Model) -> Loading:
        """Return what loads these buffers into the model. Raises what `plan_for` raises."""
        arrival, self._model = self.arrival(told, buckets), model
        if self._loading is None or not self.knows(told, buckets, model):
            self._loading = arrival, model, Loading(model, self._plan_of(told, model), arrival, self._known)
        return self._loading[2]

    def set_up(self, told: Brief, buckets: list[torch.Tensor]) -> None:
        """Make what loads these buffers now, if the model has had this layout before."""
        model = self._model
        if model is not None and self._plan is not None and self._plan[0] == (told.layout, id(model)):
            self.loading(told, buckets, model)

    def _plan_of(self, told: Brief, model: Model) -> CopyPlan | None:
        key = told.layout, id(model)
        if self._plan is None or self._plan[0] != key:
            before = self._plan is not None and self._plan[1] is not None
            self._plan = key, plan_for(model, told.outline, self._known, must=before)
        return self._plan[1]

    @property
    def last_plan(self) -> CopyPlan | None:
        """The copy plan of the last load, if it could be recorded."""
        return self._plan[1] if self._plan is not None else None

    def drop_loading(self) -> None:
        """Forget a load that failed. A part of it may still be queued."""
        self._loading = None

    def drop_buffers(self) -> None:
        """Forget all buffers."""
        self._arrival = self._loading = None
        self.early = ""


def import_early() -> None:
    """Import what torch needs to record a copy plan. It takes seconds."""
    importlib.import_module("torch._dynamo")


@cache
def warm_up(device: torch.device) -> None:
    """Do what is slow the first time in a process, while the old weights still serve."""
    if device.type == "cuda":  # compiles the kernels
        sample = torch.zeros(1 << 20, dtype=torch.bfloat16, device=device)
        found, bad = torch.zeros(1, dtype=torch.int64, device=device), torch.zeros(1, dtype=torch.int32)
        Digester([sample]).run(found)
        Digester([sample]).run(found, bad.to(device))
        Copies([(torch.empty_like(sample), sample)], often=True).run()
