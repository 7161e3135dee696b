"""The trainer's side of SGLang's own weight update: the portable baseline, and what the fast path is compared with.

SGLang's engines join a process group (`init_weights_update_group`) and are told, request by request, which tensors the
next broadcasts bring (`update_weights_from_distributed`; the engine's side is worker/sglang/stock.py). Here is the
rank that sends: its group is built directly, in the key layout of the engine's `init_custom_process_group`, so the
trainer's default group and torchrun's environment are not touched.

What the stock path does not give, and nothing around it can: an engine that waits in a broadcast cannot be called off
(after a deadline it has to be restarted), nothing that arrives is checked, and a success says that the copies were
queued, not that they have landed. Verification is a second step after it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo

from ...messages.errors import ConfigError, TransferTimeout
from ...messages.model import WeightManifest
from ..tensors import Snapshot, dtype_named
from ..wire.rendezvous import local_end
from .group import Queued, nccl_environment, settle

IN_FLIGHT = 2
"""So many flattened lots are in memory at a time, and the one that is being made."""


@dataclass(frozen=True, slots=True)
class StockRequest:
    """One `update_weights_from_distributed`: the tensors it brings, in the order of their bytes.

    dtypes: torch's names without the prefix. bucketed: one broadcast of all their bytes ("flattened_bucket"), else one
    broadcast per tensor.
    """

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    bucketed: bool

    def to_dict(self) -> dict[str, Any]:
        """As JSON carries it."""
        shapes = [list(shape) for shape in self.shapes]
        return {"names": list(self.names), "dtypes": list(self.dtypes), "shapes": shapes, "bucketed": self.bucketed}

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> StockRequest:
        """Of `to_dict`."""
        shapes = tuple(tuple(shape) for shape in raw["shapes"])
        return cls(tuple(raw["names"]), tuple(raw["dtypes"]), shapes, raw["bucketed"])


Lot = list[tuple[str, torch.Tensor]]
"""The tensors of one request."""


def split(tensors: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int | None) -> Iterator[Lot]:
    """Tensors in lots of up to `bucket_bytes` (at least one each); None: all of them in one lot.

    A new lot also begins where a tensor would not lie on a multiple of its own item size, which SGLang refuses.
    """
    lot: Lot = []
    filled = 0
    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        full = bucket_bytes is not None and filled + size > bucket_bytes
        if lot and (full or filled % tensor.element_size()):
            yield lot
            lot, filled = [], 0
        lot.append((name, tensor))
        filled += size
    if lot:
        yield lot


def request_of(lot: Sequence[tuple[str, torch.Tensor]], *, bucketed: bool) -> StockRequest:
    """What the engine is told of a lot."""
    return StockRequest(
        names=tuple(name for name, _ in lot),
        dtypes=tuple(str(tensor.dtype).removeprefix("torch.") for _, tensor in lot),
        shapes=tuple(tuple(tensor.shape) for _, tensor in lot),
        bucketed=bucketed,
    )


def requests_for(manifest: WeightManifest, bucket_bytes: int | None) -> list[StockRequest]:
    """What an engine is told of a version whose manifest it has: the same lots as `send_snapshot` sends."""
    meta = torch.device("meta")
    tensors = ((t.name, torch.empty(t.shape, dtype=dtype_named(t.dtype), device=meta)) for t in manifest.tensors)
    return [request_of(lot, bucketed=bucket_bytes is not None) for lot in split(tensors, bucket_bytes)]


def lot_bytes(manifest: WeightManifest) -> int:
    """How large the lots of a version are, as both ends can tell: like its buckets."""
    return max(manifest.bucket_nbytes, default=1)


def flatten(lot: Sequence[tuple[str, torch.Tensor]]) -> torch.Tensor:
    """(nbytes,) uint8: a copy of the lot's bytes, without gaps, as a flattened bucket is sent."""
    return torch.cat([tensor.detach().reshape(-1).view(torch.uint8) for _, tensor in lot])


def buffers_of(lot: Sequence[tuple[str, torch.Tensor]], *, bucketed: bool) -> list[torch.Tensor]:
    """What is broadcast for a lot, in order."""
    return [flatten(lot)] if bucketed else [tensor.detach().contiguous() for _, tensor in lot]


class StockGroup:
    """Rank 0 of a group whose other ranks are SGLang's tensor-parallel ranks, as `init_weights_update_group` joins it.

    One TCPStore serves any number of groups, under different names.
    """

    def __init__(self, store: Any, name: str, *, world: int, host: str, device: torch.device, timeout_s: float) -> None:
        """host: an address whose route leads to the engines. With gloo it blocks until all are there, at most
        `timeout_s`, and raises TransferTimeout; with NCCL the first broadcast connects."""
        self.name = name
        self.device = device
        inner = PrefixStore(f"{name}/", PrefixStore(name, store))
        if device.type == "cuda":
            if not torch.distributed.is_nccl_available():
                raise ConfigError("device='cuda': this PyTorch has no NCCL; allowed: 'cpu'")
            from torch.distributed import ProcessGroupNCCL  # noqa: PLC0415 – missing from CPU builds

            nccl = ProcessGroupNCCL.Options()
            nccl._timeout = timedelta(days=1)  # deadlines are kept by `send`
            with nccl_environment():
                self._group = ProcessGroupNCCL(PrefixStore("cuda/", inner), 0, world, nccl)
            return
        options = ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=timeout_s)
        options._devices = [ProcessGroupGloo.create_device(hostname=local_end(host))]
        try:
            self._group = ProcessGroupGloo(PrefixStore("cpu/", inner), 0, world, options)
        except RuntimeError as error:
            raise TransferTimeout(f"{world - 1} engine ranks were not in group {name} in time: {error}") from error

    def send(self, buffers: Iterable[torch.Tensor], timeout_s: float) -> None:
        """Broadcast them in order and wait until they are through. One call at a time; blocks.

        Raises TransferTimeout after `timeout_s` seconds, or when a peer is gone; the group is of no use after it.
        """
        deadline = time.monotonic() + timeout_s
        aborting = threading.Timer(timeout_s, self.abort)  # out of a connect or a queue that blocks the host
        aborting.daemon = True
        aborting.start()
        try:
            with torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext():
                queued: list[Queued] = []
                for buffer in buffers:
                    queued.append(self.broadcast(buffer, deadline))
                    if self.device.type == "cuda" and len(queued) >= IN_FLIGHT:
                        queued[-IN_FLIGHT].wait()  # its memory is free for the lot after the next
                if self.device.type == "cuda":
                    for broadcast in queued:
                        broadcast.wait()
                    done = torch.cuda.Event()
                    done.record()
                    settle(self, done, deadline, lambda: "")
        except RuntimeError as error:
            raise TransferTimeout(f"broadcast in group {self.name} broke off: {error}") from error
        finally:
            aborting.cancel()

    def send_snapshot(self, snapshot: Snapshot, bucket_bytes: int | None, timeout_s: float) -> None:
        """Send a version, flattened lot by lot (its own buckets have gaps, which SGLang does not know). See `send`."""
        lots = split(((name, tensor.to(self.device)) for name, tensor in snapshot.tensors()), bucket_bytes)
        bucketed = bucket_bytes is not None
        self.send((buffer for lot in lots for buffer in buffers_of(lot, bucketed=bucketed)), timeout_s)

    def broadcast(self, buffer: torch.Tensor, deadline: float) -> Queued:
        """Queue one (NCCL, behind the current stream) or send it (gloo). Raises RuntimeError."""
        if self.device.type == "cpu":
            left = max(0.001, deadline - time.monotonic())
            work = self._group.broadcast(buffer, 0)
            work.wait(timedelta(seconds=left))
            over: Queued = work
            return over
        options = BroadcastOptions()
        options.rootRank = 0
        options.asyncOp = True
        queued: Queued = self._group.broadcast([buffer], options)
        return queued

    def abort(self) -> None:
        """End whatever is under way here. The engines are not reached by it: gloo's find their connections closed,
        NCCL's wait on and have to be restarted."""
        with contextlib.suppress(RuntimeError, AttributeError):
            self._group.abort()
