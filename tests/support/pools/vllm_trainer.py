"""What a trainer of vLLM's puts on the wire: NCCL's unique id in a pickle, and tensors packed into buffers."""

from __future__ import annotations

import ctypes
import pickle
import sys
from types import ModuleType
from unittest import mock

import torch

from rolloutmq.ops.gateway.vllm.receiver import ID_BYTES, ID_CLASS


def pickled_id(content: bytes) -> bytes:
    """The id as vLLM's trainer writes it into its store."""
    module, name = ID_CLASS
    parts = module.split(".")
    modules = {".".join(parts[:count]): ModuleType(part) for count, part in enumerate(parts, 1)}
    kind = type(
        name, (ctypes.Structure,), {"_fields_": (("internal", ctypes.c_byte * ID_BYTES),), "__module__": module}
    )
    setattr(modules[module], name, kind)
    with mock.patch.dict(sys.modules, modules):
        return pickle.dumps(kind.from_buffer_copy(content))


def packed(tensors: list[torch.Tensor], most: int | None) -> list[torch.Tensor]:
    """In buffers that are flushed when they have more than `most` bytes, or each by itself."""
    if most is None:
        return tensors
    buffers, some = list[torch.Tensor](), list[torch.Tensor]()
    for tensor in tensors:
        some.append(tensor.contiguous().view(torch.uint8).flatten())
        if sum(map(len, some)) > most:
            buffers, some = [*buffers, torch.cat(some)], []
    return [*buffers, torch.cat(some)] if some else buffers
