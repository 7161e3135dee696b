"""Whether a version fits an engine's model: names, shapes, dtypes, tied embeddings. A refusal names the tensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ...messages.errors import DigestMismatch
from ...messages.model import TensorSpec
from ..tensors import dtype_name, hex_of

HEAD = "lm_head.weight"
TIED = frozenset({HEAD})
"""Tensors that a model with tied embeddings holds under another name."""
Shape = tuple[int, ...]


def check_names(sent: Mapping[str, Shape], expected: Mapping[str, Shape]) -> None:
    """Refuse tensors that are not the model's. Tied embeddings may come with their second name or without it.

    SGLang itself only logs an unknown name, keeps the old weights of a missing one, and breaks off half way at a wrong
    shape. Raises DigestMismatch, which names the tensors.
    """
    strange, missing = sent.keys() - expected.keys() - TIED, expected.keys() - sent.keys() - TIED
    if strange or missing:
        what = [f"{kind} {sorted(names)[:3]}" for kind, names in (("unknown", strange), ("missing", missing)) if names]
        raise DigestMismatch(f"not the tensors of this model: {', '.join(what)}")
    for name, shape in sent.items():
        if expected.get(name, shape) != shape:
            raise DigestMismatch(f"tensor {name}: shape {shape}, the model's is {expected[name]}")


def check_dtype(name: str, sent: torch.dtype, held: torch.dtype, stored: str) -> None:
    """Refuse a conversion that loses something and that nobody declared. Raises DigestMismatch.

    sent, held: the tensor's dtypes in the version and in the engine. stored: its dtype in the engine's own checkpoint,
    which the engine has converted before, or "". float32 may become bfloat16: whoever runs an engine in bfloat16 says
    what a trainer's float32 weights are rounded to. No other rounding and no change of kind is taken for granted.
    """
    if stored == dtype_name(sent) or (sent, held) == (torch.float32, torch.bfloat16) or loses_nothing(sent, held):
        return
    expected = dtype_name(held)
    how = f"; WeightPublisher(dtype={expected!r}) rounds it" if _kind(sent) == _kind(held) == "float" else ""
    raise DigestMismatch(f"tensor {name}: dtype {dtype_name(sent)}, the model expects {expected}{how}")


def loses_nothing(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether `target` is of the same kind as `source` and has all of its values."""
    try:
        return source == target or (_kind(source) == _kind(target) and torch.promote_types(source, target) == target)
    except RuntimeError:  # torch promotes neither 8-bit floats nor wide unsigned integers
        return False


def _kind(dtype: torch.dtype) -> str:
    if dtype == torch.bool:
        return "bool"
    return "float" if dtype.is_floating_point else "complex" if dtype.is_complex else "integer"


def is_tied(model: Any) -> bool | None:
    """Whether the model's configuration ties its embeddings; None if it does not say."""
    config = getattr(model, "config", None)
    for each in (config, getattr(config, "text_config", None)):
        if isinstance(tied := getattr(each, "tie_word_embeddings", None), bool):
            return tied
    return None


def twins_of(specs: Sequence[TensorSpec], dropped: Iterable[str]) -> dict[int, list[int]]:
    """Return, for each tensor that the engine does not store, those that it may use for it: like dtype and shape.

    They are numbered as in `specs`. Raises DigestMismatch if there is none.
    """
    twins: dict[int, list[int]] = {}
    names = set(dropped)
    stored = [(number, spec) for number, spec in enumerate(specs) if spec.name not in names]
    for index, spec in enumerate(specs):
        if spec.name in names:
            like = (spec.dtype, spec.shape)
            twins[index] = [number for number, other in stored if (other.dtype, other.shape) == like]
            if not twins[index]:
                raise DigestMismatch(f"tensor {spec.name}: the model has no use for it")
    return twins


def check_dropped(specs: Sequence[TensorSpec], dropped: Mapping[int, list[int]], digests: torch.Tensor) -> None:
    """Refuse a tensor that the engine does not store if none of its twins has its bits. Raises DigestMismatch.

    digests: (tensors,) int64 on the CPU, the version's.
    """
    for index, twins in dropped.items():
        if not (digests[twins] == digests[index]).any():
            mine, others = hex_of(digests[index : index + 1])[0], hex_of(digests[twins])
            told = ", ".join(f"{specs[n].name} ({value})" for n, value in zip(twins, others, strict=True))
            name = specs[index].name
            raise DigestMismatch(f"tensor {name}: digest {mine}, but the model is tied and uses {told} for it")
