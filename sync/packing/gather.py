"""What a trainer hands over, made plain: sharded parameters gathered, wrappers' names undone, the rest refused by name.

FSDP2 (`fully_shard`) and tensor parallelism keep parameters as DTensors. Each is gathered by a collective of its own:
every rank that holds a part of it has to come by, in the same order.
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
    """A parameter's name without what wrappers add to it; for `PackedWeights(rename=...)`.

    `torch.compile` puts "_orig_mod." where the compiled module is, activation checkpointing
    "_checkpoint_wrapped_module.", DistributedDataParallel and DataParallel "module." in front. A model that has a child
    of that name at its top needs a function of its own.

    >>> strip_wrappers("_orig_mod.module.model.layers.0._checkpoint_wrapped_module.mlp.up_proj.weight")
    'model.layers.0.mlp.up_proj.weight'
    """
    parts = [part for part in name.split(".") if part not in _ANYWHERE]
    while len(parts) > 1 and parts[0] == "module":
        del parts[0]
    return ".".join(parts)


def is_sharded(tensor: object) -> bool:
    """Whether it is a DTensor. What defines it takes half a second to import; who has one has imported it already."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def gathered(tensor: Any) -> Any:
    """`tensor`, or the whole of it if it is a DTensor (a collective); on the device where its mesh computes.

    On CUDA it is ordered on the current stream, the host does not wait. Besides the result torch needs up to the same
    memory once more while it gathers shards of unequal sizes. A DTensor that cannot be gathered comes back as it is:
    one without storage, or one of a mesh that this rank is no part of.
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
    """A dense tensor with memory of its own kind. Raises InvalidField for whatever else a trainer might hold.

    Only `torch.Tensor`, parameters, and subclasses that merely add attributes can be read as they are: FSDP1's flat
    parameters, ShardedTensors, quantized and fake tensors are not what their name and shape say.
    """
    field = f"tensors[{name}]"
    if _FSDP1 in str(name) or getattr(tensor, "_is_flat_param", False):
        raise InvalidField(field, type(tensor).__name__, "not a shard of FSDP1: use summon_full_params, or fully_shard")
    kind = type(tensor)
    if kind not in _PLAIN:
        if not isinstance(tensor, torch.Tensor):
            raise InvalidField(field, kind.__name__, "dense torch tensors with storage")
        if hasattr(tensor, "trigger_wait"):  # AsyncCollectiveTensor: the result of a collective that may be under way
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
