"""Makes plain tensors of a trainer's tensors: gathers sharded parameters, undoes wrappers' names, refuses the rest.

FSDP2 (`fully_shard`) and tensor parallelism keep parameters as DTensors. Each is gathered by a collective of its own.
So every rank that holds a part of it must take part, in the same order.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from ...messages.errors import InvalidField

_ANYWHERE = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})
_FSDP1 = "_fsdp_wrapped_module"
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def strip_wrappers(name: str) -> str:
    """Remove from a parameter's name what wrappers have added to it. For `PackedWeights(rename=...)`.

    `torch.compile` adds "_orig_mod." where the compiled module is, and activation checkpointing adds
    "_checkpoint_wrapped_module.". DistributedDataParallel and DataParallel add "module." in front. A model whose top
    module has a child named "module" needs a function of its own.

    >>> strip_wrappers("_orig_mod.module.model.layers.0._checkpoint_wrapped_module.mlp.up_proj.weight")
    'model.layers.0.mlp.up_proj.weight'
    """
    parts = [part for part in name.split(".") if part not in _ANYWHERE]
    while len(parts) > 1 and parts[0] == "module":
        del parts[0]
    return ".".join(parts)


def is_sharded(tensor: object) -> bool:
    """Whether it is a DTensor. Does not import the module of DTensors, which takes half a second."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)  # not there yet while it is imported
    return kind is not None and isinstance(tensor, kind)


def gathered(tensor: Any) -> Any:
    """Gather `tensor` if it is a DTensor (a collective), on the device where its mesh computes; else return it.

    On CUDA the gather is queued on the current stream, and the host does not wait. To gather shards of unequal sizes
    torch needs the result's memory twice. A DTensor that has no storage, or whose mesh does not include this rank,
    cannot be gathered and is returned as it is.
    """
    if type(tensor) in _PLAIN or not is_sharded(tensor):
        return tensor
    if tensor.is_meta or tensor.device_mesh.get_coordinate() is None:
        return tensor
    kind = tensor.device_mesh.device_type
    if tensor.device.type != kind:  # offloaded to the CPU, where NCCL cannot gather
        tensor = tensor.to(kind)
    return tensor.full_tensor()


def plain(name: str, tensor: Any) -> torch.Tensor:
    """Return a dense tensor. Raises InvalidField for anything else that a trainer may hold.

    `torch.Tensor`, parameters, and subclasses that only add attributes are read as they are. FSDP1's flat parameters,
    ShardedTensors, quantized and fake tensors are refused: their memory is not what name and shape say.
    """
    field = f"tensors[{name}]"
    if _FSDP1 in str(name) or getattr(tensor, "_is_flat_param", False):
        raise InvalidField(field, type(tensor).__name__, "not a shard of FSDP1: use summon_full_params, or fully_shard")
    kind = type(tensor)
    if kind not in _PLAIN:
        if not isinstance(tensor, torch.Tensor):
            raise InvalidField(field, kind.__name__, "dense torch tensors with storage")
        if hasattr(tensor, "trigger_wait"):  # AsyncCollectiveTensor: its collective may be under way
            return plain(name, tensor.trigger_wait())
        if is_sharded(tensor):
            raise InvalidField(
                field, str(tensor.device_mesh), "a DTensor with storage, of a mesh that has this rank in it"
            )
        ordinary = kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        if not ordinary or torch.nn.parameter.is_lazy(tensor):
            raise InvalidField(field, kind.__name__, "plain tensors or DTensors, not a subclass with a life of its own")
        tensor = tensor.detach().as_subclass(torch.Tensor)
    if tensor.layout is not torch.strided or tensor.is_meta:
        what = "meta" if tensor.is_meta else tensor.layout
        raise InvalidField(field, f"{kind.__name__} ({what})", "dense torch tensors with storage")
    return tensor
