"""Gives the fused tensors of a mixture of experts the names that `publish` needs, those of a checkpoint.

docs/weights.md says when a trainer needs it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ...messages.errors import InvalidField
from .gather import gathered, strip_wrappers

GATE_UP, DOWN = "gate_up_proj", "down_proj"


@dataclass(frozen=True, slots=True)
class Names:
    """What a family's checkpoints call the parts of an expert. block: what stands in the place of "mlp"."""

    gate: str
    up: str
    down: str
    block: str = "mlp"


_PROJECTIONS = Names("gate_proj", "up_proj", "down_proj")
_NUMBERED = Names("w1", "w3", "w2", "block_sparse_moe")

CHECKPOINT_NAMES: Mapping[str, Names] = {
    "deepseek_v3": _PROJECTIONS,
    "glm4_moe": _PROJECTIONS,
    "minimax_m2": _NUMBERED,
    "mixtral": _NUMBERED,
    "olmoe": _PROJECTIONS,
    "qwen2_moe": _PROJECTIONS,
    "qwen3_moe": _PROJECTIONS,
    "qwen3_next": _PROJECTIONS,
}
"""`config.model_type` -> names, from transformers' conversion_mapping. In all of them gate is the first half of
gate_up_proj."""


def unfuse_experts(
    tensors: Iterable[tuple[str, Any]] | Mapping[str, Any], model_type: str
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the same weights under the names that `save_pretrained` writes, for `WeightPublisher.publish`.

    >>> publisher.publish(version, unfuse_experts(model.named_parameters(), model.config.model_type))  # doctest: +SKIP

    tensors: (name, tensor) pairs as the Hugging Face module has them. What wrappers add to names stays, and
        `rename=strip_wrappers` removes it. A module that keeps its experts apart (transformers 4) comes out unchanged.
    model_type: the module's `config.model_type`, one of `CHECKPOINT_NAMES`. It is needed because names and shapes alone
        do not tell Qwen's checkpoints from Mixtral's, nor a layout with gate and up interleaved.

    The parts of a fused tensor are views of it: nothing is copied. A fused DTensor is first gathered whole, by one
    collective, in the order of `tensors`. So every rank of the trainer iterates over all of them. Other DTensors stay
    as they are. No tensor is kept while the next one is made.

    Raises InvalidField on every rank alike: at once for an unknown model_type, and for tensors under `experts` that do
    not have this layout, or are of different models.
    """
    names = CHECKPOINT_NAMES.get(model_type)
    if names is None:
        raise InvalidField("model_type", model_type, f"one of {', '.join(sorted(CHECKPOINT_NAMES))}")
    return _unfused(tensors, names)


def _unfused(
    tensors: Iterable[tuple[str, Any]] | Mapping[str, Any], names: Names
) -> Iterator[tuple[str, torch.Tensor]]:
    shapes: dict[str, tuple[int, int, int]] = {}  # by layer: experts, inner, hidden
    for name, tensor in tensors.items() if isinstance(tensors, Mapping) else tensors:
        parent, _, leaf = name.rpartition(".")
        prefix = _renamed(parent, names)
        if strip_wrappers(parent).rpartition(".")[2] != "experts":
            yield (f"{prefix}.{leaf}" if prefix else leaf), tensor
            del tensor
            continue
        shape = _sizes(name, leaf, tensor)
        if shapes.setdefault(parent, shape) != shape:
            other = "the layer's other one has {}, {} and {}".format(*shapes[parent])
            allowed = f"{GATE_UP} (experts, 2 * inner, hidden), {DOWN} (experts, hidden, inner); {other}"
            raise InvalidField(f"tensors[{name}].shape", tuple(tensor.shape), allowed)
        whole = gathered(tensor).detach()
        del tensor
        for expert in range(shape[0]):
            if leaf == DOWN:
                yield f"{prefix}.{expert}.{names.down}.weight", whole[expert]
            else:
                yield f"{prefix}.{expert}.{names.gate}.weight", whole[expert, : shape[1]]
                yield f"{prefix}.{expert}.{names.up}.weight", whole[expert, shape[1] :]
        del whole


def _renamed(parent: str, names: Names) -> str:
    return ".".join(names.block if part == "mlp" else part for part in parent.split("."))


def _sizes(name: str, leaf: str, tensor: Any) -> tuple[int, int, int]:
    """Return (experts, inner, hidden) of a fused tensor. Raises InvalidField for another tensor."""
    if leaf not in {GATE_UP, DOWN}:
        raise InvalidField("tensors", name, f"under experts {GATE_UP} and {DOWN}, or modules by number")
    shape = tuple(tensor.shape)
    if len(shape) != 3 or (leaf == GATE_UP and shape[1] % 2):
        raise InvalidField(f"tensors[{name}].shape", shape, "(experts, 2 * inner, hidden) or (experts, hidden, inner)")
    experts, rows, columns = shape
    return (experts, rows // 2, columns) if leaf == GATE_UP else (experts, columns, rows)
