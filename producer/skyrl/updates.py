"""An update request of any of SkyRL's forms, checked: which tensors, and the way they come."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ...messages.errors import InvalidField

Way = Literal["tensors", "ipc", "broadcast"]
_ALIASES = {"bf16": "bfloat16", "half": "float16", "fp16": "float16", "fp32": "float32", "float": "float32"}
_KEYS = frozenset({"names", "dtypes", "shapes", "sizes", "extras", "packed", "tensors", "ipc_handles"})
_SINGLE = {"name": "names", "dtype": "dtypes", "shape": "shapes", "tensor": "tensors", "extra": "extras"}


@dataclass(frozen=True, slots=True)
class Update:
    """Tensors of a version: what they are, and how they come.

    way: "tensors" (here they are), "ipc" (handles, one per tensor or one for all of them: `packed`), or "broadcast" (in
        the group that was joined, one after the other).
    dtypes: torch's names without the prefix. sizes: elements of each, with `packed`.
    """

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    way: Way
    tensors: tuple[Any, ...] = ()
    handles: tuple[Mapping[str, Any], ...] = ()
    sizes: tuple[int, ...] = field(default=())
    packed: bool = False


def read_update(request: Any) -> Update:
    """A NamedWeightsUpdateRequest, the older form for one tensor, or one of newer SkyRL's dataclasses.

    Raises InvalidField, naming the key.
    """
    raw = _mapping(request)
    names = _list(raw, "names")
    if not names or not all(isinstance(name, str) and name for name in names):
        raise InvalidField("names", names, "names of tensors, at least one")
    if len(set(names)) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise InvalidField("names", twice, "every name once")
    way, tensors, handles, packed = _way(raw, len(names))
    dtypes = [_dtype(one) for one in _list(raw, "dtypes")]
    shapes = [_shape(one) for one in _list(raw, "shapes")]
    if tensors and not dtypes and not shapes:
        dtypes, shapes = [_dtype(one.dtype) for one in tensors], [_shape(one.shape) for one in tensors]
    for key, found in (("dtypes", dtypes), ("shapes", shapes)):
        if len(found) != len(names):
            raise InvalidField(key, found, f"{len(names)} entries, one for each name")
    for name, tensor, shape in zip(names, tensors, shapes, strict=False):
        if _shape(tensor.shape) != shape:
            raise InvalidField("shapes", shape, f"the shape of tensor {name}, which is {_shape(tensor.shape)}")
    sizes = tuple(_list(raw, "sizes"))
    if packed:
        _check_packed(sizes, shapes, dtypes)
    return Update(tuple(names), tuple(dtypes), tuple(shapes), way, tensors, handles, sizes, packed)


def _mapping(request: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(request) and not isinstance(request, type):
        raw = {one.name: getattr(request, one.name) for one in dataclasses.fields(request)}
    elif isinstance(request, Mapping):
        raw = dict(request)
    else:
        raise InvalidField("request", request, "a mapping with names, dtypes and shapes, or a dataclass with them")
    if "name" in raw:  # the older form
        extra = raw.pop("extras", None)
        raw = {_SINGLE.get(key, key): [value] for key, value in raw.items() if value is not None}
        if extra:
            raw["extras"] = [extra]
    if strange := sorted(map(str, raw.keys() - _KEYS)):
        raise InvalidField(strange[0], raw[strange[0]], f"one of {', '.join(sorted(_KEYS))}")
    return raw


def _list(raw: Mapping[str, Any], key: str) -> list[Any]:
    value = raw.get(key)
    if value is None:
        return []
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise InvalidField(key, value, "a list")
    return list(value)


def _way(raw: Mapping[str, Any], count: int) -> tuple[Way, tuple[Any, ...], tuple[Mapping[str, Any], ...], bool]:
    extras, tensors = _list(raw, "extras"), tuple(_list(raw, "tensors"))
    inside = [extra.get("tensor") for extra in extras if isinstance(extra, Mapping) and extra.get("tensor") is not None]
    tensors = tensors or tuple(inside)
    handles = tuple(extra["ipc_handles"] for extra in extras if isinstance(extra, Mapping) and "ipc_handles" in extra)
    whole = raw.get("ipc_handles")  # newer SkyRL: one handle for everything
    packed = bool(raw.get("packed")) or whole is not None
    if whole is not None:
        handles = (whole,)
    if tensors and handles:
        raise InvalidField("extras", "ipc_handles", "either tensors or their handles")
    if tensors:
        if len(tensors) != count:
            raise InvalidField("tensors", f"{len(tensors)} tensors", f"{count} of them, one for each name")
        return "tensors", tensors, (), False
    if handles:
        expected = 1 if packed else count
        if len(handles) != expected:
            raise InvalidField("extras", f"{len(handles)} handles", f"{expected} of them")
        return "ipc", (), handles, packed
    if packed:
        raise InvalidField("packed", True, "only together with extras=[{'ipc_handles': …}]")
    return "broadcast", (), (), False


def _dtype(value: Any) -> str:
    name = str(value).removeprefix("torch.")
    return _ALIASES.get(name, name)


def _shape(value: Any) -> tuple[int, ...]:
    try:
        shape = tuple(int(size) for size in value)
    except (TypeError, ValueError):
        raise InvalidField("shapes", value, "a list of sizes for each tensor") from None
    if any(size < 0 for size in shape):
        raise InvalidField("shapes", value, "sizes of 0 or more")
    return shape


def _check_packed(sizes: Sequence[Any], shapes: Sequence[tuple[int, ...]], dtypes: Sequence[str]) -> None:
    if len(set(dtypes)) != 1:
        raise InvalidField("dtypes", sorted(set(dtypes)), "one and the same for all tensors that are packed together")
    if len(sizes) != len(shapes):
        raise InvalidField("sizes", sizes, f"{len(shapes)} entries, one for each name")
    for size, shape in zip(sizes, shapes, strict=True):
        elements = 1
        for one in shape:
            elements *= one
        if size != elements:
            raise InvalidField("sizes", size, f"{elements} for a tensor of shape {shape}")
