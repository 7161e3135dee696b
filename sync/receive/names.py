"""Which tensors a model has, of which shapes, as its checkpoint tells."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

from safetensors import safe_open

from ...messages.errors import DigestMismatch
from .layout import TIED

Shape = tuple[int, ...]


@cache
def checkpoint_shapes(model: str) -> Mapping[str, Shape]:
    """Shapes of the tensors in a local safetensors checkpoint, by name; none if there is none to look at."""
    shapes: dict[str, Shape] = {}
    for file in Path(model).glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 – it is no mapping
                shapes[name] = tuple(tensors.get_slice(name).get_shape())
    return shapes


def check_names(sent: Mapping[str, Shape], expected: Mapping[str, Shape]) -> None:
    """SGLang only logs a name it does not know, keeps the old weights of one that is not sent, and breaks off half way
    at one that does not fit.

    Raises DigestMismatch naming the tensors. Tied embeddings may come with their second name or without.
    """
    strange, missing = sent.keys() - expected.keys() - TIED, expected.keys() - sent.keys() - TIED
    if strange or missing:
        what = [f"{kind} {sorted(names)[:3]}" for kind, names in (("unknown", strange), ("missing", missing)) if names]
        raise DigestMismatch(f"not the tensors of this model: {', '.join(what)}")
    for name, shape in sent.items():
        if expected.get(name, shape) != shape:
            raise DigestMismatch(f"tensor {name}: shape {shape}, the model's is {expected[name]}")
