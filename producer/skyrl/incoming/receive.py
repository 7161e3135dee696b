"""Receives a SkyRL trainer's tensors in this process. It is the only module here that imports torch at its top.

A broadcast group is the one that `init_custom_process_group` of SkyRL and SGLang makes: a TCPStore on the trainer, with
the keys of one backend under two prefixes of the group's name. This module builds the group from the store directly.
So it does not depend on the default group, the environment or other groups' names in this process.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from concurrent.futures import TimeoutError as FutureTimeout
from datetime import timedelta
from functools import partial
from typing import Any, cast

import torch
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore

from ....messages.errors import ConfigError, InvalidField, TransferTimeout
from ....sync.wire import MARGIN_S, await_broadcasts, begin, local_end, nccl_environment
from .request import GroupInfo, Update

BACKENDS = ("gloo", "nccl")


def dtype_named(name: str) -> torch.dtype:
    """torch's dtype with this name. Raises InvalidField."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise InvalidField("dtypes", name, "names of torch's dtypes, as 'bfloat16'")
    return found


class ReceivingGroup:
    """Some ranks of a trainer's group, all in this process. SkyRL counts one rank for each GPU of its engines.

    The first rank's tensors are kept. The other ranks take part because a broadcast needs every rank.
    """

    def __init__(self, info: GroupInfo, ranks: range, *, device: str, timeout_s: float) -> None:
        """Join within `timeout_s`. Raises InvalidField, ConfigError, or TransferTimeout if a rank did not join."""
        self.name, address, port, world, backend = info.name, info.address, info.port, info.world_size, info.backend
        if backend not in BACKENDS:
            raise InvalidField("backend", backend, f"one of {', '.join(BACKENDS)}")
        if not 0 < ranks.start < ranks.stop <= world:
            raise InvalidField("rank_offset", ranks.start, f"1 to {world - 1}: world_size={world}, and rank 0 sends")
        self.device = torch.device("cpu" if backend == "gloo" else device)
        if backend == "nccl":
            if self.device.type != "cuda":
                raise InvalidField("backend", backend, "'gloo', unless the engine has receiver_device='cuda:…'")
            if len(ranks) > 1:
                raise InvalidField("backend", backend, f"'gloo': NCCL has one rank a GPU, and these are {len(ranks)}")
        began = time.monotonic()

        def join(rank: int) -> Any:
            left = timedelta(seconds=max(0.1, timeout_s - (time.monotonic() - began)))
            store = TCPStore(address, port, world, is_master=False, timeout=left)
            inner = PrefixStore(f"{info.name}/", PrefixStore(info.name, store))
            return (
                self._gloo(inner, address, rank, world, left) if backend == "gloo" else self._nccl(inner, rank, world)
            )

        try:
            joining = [begin(partial(join, rank)) for rank in ranks]  # each waits for the others
            self._ranks = [one.result(max(0.1, began + timeout_s + MARGIN_S - time.monotonic())) for one in joining]
        except (RuntimeError, FutureTimeout) as error:
            why = f"group {info.name!r} at {address}:{port} was not complete in {timeout_s:.0f} s"
            raise TransferTimeout(f"{why} (ranks {ranks.start} to {ranks.stop - 1} of {world}): {error}") from error

    @staticmethod
    def _gloo(store: Any, address: str, rank: int, world: int, left: timedelta) -> Any:
        options = ProcessGroupGloo._Options()
        options._timeout = left
        options._devices = [ProcessGroupGloo.create_device(hostname=local_end(address))]
        return ProcessGroupGloo(PrefixStore("cpu/", store), rank, world, options)

    def _nccl(self, store: Any, rank: int, world: int) -> Any:
        if not torch.distributed.is_nccl_available():
            raise ConfigError("backend='nccl': this PyTorch has no NCCL; allowed: 'gloo'")
        from torch.distributed import ProcessGroupNCCL  # noqa: PLC0415 – missing from CPU builds

        options = ProcessGroupNCCL.Options()
        options._timeout = timedelta(days=1)  # deadlines are kept by `receive`
        with nccl_environment(), torch.cuda.device(self.device):
            return ProcessGroupNCCL(PrefixStore("cuda/", store), rank, world, options)

    def receive(self, update: Update, timeout_s: float) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of a request, in order. Blocks for up to `timeout_s` for each.

        Raises TransferTimeout. The group cannot be used after that.
        """
        for name, dtype, shape in zip(update.names, update.dtypes, update.shapes, strict=True):
            buffers = [torch.empty(shape, dtype=dtype_named(dtype), device=self.device) for _ in self._ranks]
            try:
                if buffers[0].numel():
                    self._broadcast(buffers, time.monotonic() + timeout_s)
            except RuntimeError as error:
                raise TransferTimeout(f"tensor {name} did not come in group {self.name!r}: {error}") from error
            yield name, buffers[0]

    def _broadcast(self, buffers: list[torch.Tensor], deadline: float) -> None:
        options = BroadcastOptions()
        options.rootRank = 0
        options.asyncOp = True
        queued = [rank.broadcast([buffer], options) for rank, buffer in zip(self._ranks, buffers, strict=True)]
        if self.device.type == "cpu":
            for work in queued:
                work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))
            return
        with torch.cuda.device(self.device):
            for work in queued:
                work.wait()
            done = torch.cuda.Event()
            done.record()
            await_broadcasts(cast(Any, self), done, deadline, lambda: "")  # it only calls the group's `abort`

    def abort(self) -> None:
        """Leave the group at once. A sender that waits in it finds its connections closed."""
        for rank in self._ranks:
            if self.device.type == "cuda":
                rank.abort()
        self._ranks = []


def from_ipc(update: Update, device: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Views of the trainer's own tensors on this GPU. Copy them before the trainer goes on.

    The handles come from torch's reduce_tensor: (function, arguments). Only torch's own function is ever called.
    Raises InvalidField if there is no handle for this GPU, or for another kind of handle.
    """
    if not torch.cuda.is_available():
        raise InvalidField("extras", "ipc_handles", "tensors or a broadcast: CUDA IPC needs a GPU, and here is none")
    place = torch.device(device if device.startswith("cuda") else "cuda")
    index = place.index if place.index is not None else torch.cuda.current_device()
    uuid = str(torch.cuda.get_device_properties(index).uuid)
    opened = [_open(handles, uuid, index) for handles in update.handles]
    if not update.packed:
        yield from zip(update.names, opened, strict=True)
        return
    flat, start = opened[0], 0
    if flat.numel() < sum(update.sizes):
        raise InvalidField("sizes", sum(update.sizes), f"at most the {flat.numel()} elements that the handle has")
    for name, shape, size in zip(update.names, update.shapes, update.sizes, strict=True):
        yield name, flat[start : start + size].view(shape)
        start += size


def _open(handles: Any, uuid: str, index: int) -> torch.Tensor:
    from torch.multiprocessing.reductions import rebuild_cuda_tensor  # noqa: PLC0415

    found = handles.get(uuid) if hasattr(handles, "get") else None
    if found is None:
        raise InvalidField("ipc_handles", sorted(handles), f"a handle for this process's GPU, {uuid}")
    function, arguments = found
    if function is not rebuild_cuda_tensor:
        raise InvalidField("ipc_handles", function, "handles of torch.multiprocessing.reductions.reduce_tensor")
    values = list(arguments)
    values[6] = index  # this process's number of the device; the trainer's may differ
    tensor: torch.Tensor = rebuild_cuda_tensor(*values)
    return tensor


def checked(update: Update, pairs: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors, in the request's shapes. Raises InvalidField for the first whose dtype or size differs from it."""
    for (name, tensor), dtype, shape in zip(pairs, update.dtypes, update.shapes, strict=True):
        if tensor.dtype != dtype_named(dtype):
            raise InvalidField("dtypes", dtype, f"{str(tensor.dtype).removeprefix('torch.')}, which tensor {name} has")
        if tensor.numel() != math.prod(shape):
            raise InvalidField("shapes", shape, f"a shape of {tensor.numel()} elements, which tensor {name} has")
        yield name, tensor.view(shape)


def received(update: Update, group: ReceivingGroup | None, device: str, timeout_s: float) -> dict[str, torch.Tensor]:
    """Copies of a request's tensors, which share no memory with the trainer. Blocks.

    Raises InvalidField, ConfigError, TransferTimeout.
    """
    if update.way == "broadcast":
        if group is None:
            why = "init_weight_update_communicator first, or send tensors or IPC handles with the request"
            raise InvalidField("extras", None, why)
        return dict(group.receive(update, timeout_s))
    source = zip(update.names, update.tensors, strict=True) if update.way == "tensors" else from_ipc(update, device)
    kept = {name: tensor.detach().clone() for name, tensor in checked(update, iter(source))}
    if update.way == "ipc":
        torch.cuda.synchronize()  # when this returns, the trainer writes into the memory that was copied
    return kept
