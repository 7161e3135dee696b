"""Whether the tensors of a version are the ones of an engine's model: names and shapes."""

from __future__ import annotations

from collections.abc import Mapping

from ...messages.errors import DigestMismatch

TIED = frozenset({"lm_head.weight"})
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
