"""Reads a trainer's requests to join a group and to take weights, in any of SkyRL's forms."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NotRequired, TypedDict

from ....messages.errors import FeatureUnavailable, InvalidField

Way = Literal["tensors", "ipc", "broadcast"]
_ALIASES = {"bf16": "bfloat16", "half": "float16", "fp16": "float16", "fp32": "float32", "float": "float32"}
_KEYS = frozenset({"names", "dtypes", "shapes", "sizes", "extras", "packed", "tensors", "ipc_handles"})


class NamedWeightsUpdateRequest(TypedDict):
    """Tensors of one version, some or all. docs/skyrl.md describes the three ways in which they can arrive.

    names: as the model's checkpoint has them. dtypes: "bfloat16", "torch.bfloat16". shapes: one for each.
    sizes: elements of each, with `packed`. extras: one entry per tensor (one in all with `packed`):
        {"ipc_handles": {GPU's UUID: (function, arguments)}} as torch's reduce_tensor makes them.
    packed: the tensor of the only handle holds all tensors one after the other.
    tensors: an addition to SkyRL: the tensors themselves.
    """

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    sizes: NotRequired[list[int]]
    extras: NotRequired[list[dict[str, Any]] | None]
    packed: NotRequired[bool]
    tensors: NotRequired[list[Any]]


@dataclass(frozen=True, slots=True)
class Update:
    """Tensors of a version, and how they arrive.

    way: "tensors" (they are in the request), "ipc" (as handles, one per tensor, or one for all if `packed`), or
        "broadcast" (one after the other in the joined group).
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


def read_adapter_request(request: Any) -> tuple[str, str] | None:
    """The name ("" without one) and the folder of the adapter in SkyRL's LoraLoadRequest. None for another request."""
    raw = request if isinstance(request, Mapping) else getattr(request, "__dict__", {})
    if (path := raw.get("lora_path")) is None:
        return None
    name = raw.get("lora_name") or ""
    for field_name, value in (("lora_path", path), ("lora_name", name)):
        if not isinstance(value, str) or (field_name == "lora_path" and not value):
            raise InvalidField(field_name, value, "a text")
    return name, path


def read_update(request: Any) -> Update:
    """Read a NamedWeightsUpdateRequest, or a dataclass of newer SkyRL.

    Raises InvalidField, which names the key.
    """
    raw = _mapping(request)
    names = _list(raw, "names")
    if not names or not all(isinstance(name, str) and name for name in names):
        raise InvalidField("names", names, "names of tensors, at least one")
    if len(set(names)) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise InvalidField("names", twice, "every name once")
    way, tensors, handles, packed = _arrival(raw, len(names))
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


def _arrival(raw: Mapping[str, Any], count: int) -> tuple[Way, tuple[Any, ...], tuple[Mapping[str, Any], ...], bool]:
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
        if size != math.prod(shape):
            raise InvalidField("sizes", size, f"{math.prod(shape)} for a tensor of shape {shape}")


@dataclass(frozen=True, slots=True)
class GroupInfo:
    """A trainer's broadcast group, in which this process has the ranks from `rank_offset` on."""

    address: str
    port: int
    rank_offset: int
    world_size: int
    name: str
    backend: str
    override_existing: bool


def read_group(  # noqa: PLR0917 – in the order of SkyRL's arguments
    init_info: Any, override_existing: bool, address: Any, port: Any, offset: int, world: int, name: str, backend: str
) -> GroupInfo | None:
    """The group to join, from an `init_info` or from the arguments after it. None for CUDA IPC, which needs no group.

    Raises InvalidField, and FeatureUnavailable for a group that only vLLM can join.
    """
    if init_info is not None and not isinstance(init_info, str):
        if not hasattr(init_info, "master_addr"):
            if hasattr(init_info, "model_dtype_str") or "Ipc" in type(init_info).__name__:
                return None
            raise InvalidField("init_info", init_info, "SkyRL's BroadcastInitInfo or CudaIpcInitInfo, or an address")
        if not hasattr(init_info, "backend"):
            why = "update_named_weights with tensors: this group is vLLM's own communicator, not one of torch's"
            raise FeatureUnavailable("init_weight_update_communicator", type(init_info).__name__, why)
        address, port, offset = init_info.master_addr, init_info.master_port, init_info.rank_offset
        world, name, backend = init_info.world_size, init_info.group_name, init_info.backend
        override_existing = override_existing or bool(getattr(init_info, "override_existing_receiver", False))
    address = address or init_info
    if not isinstance(address, str) or not address:
        raise InvalidField("master_addr", address, "an address")
    for field_name, value, least in (("master_port", port, 1), ("rank_offset", offset, 1), ("world_size", world, 2)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise InvalidField(field_name, value, f"a whole number, at least {least}")
    if offset >= world:
        raise InvalidField("rank_offset", offset, f"below world_size={world}")
    return GroupInfo(address, port, offset, world, name, backend, override_existing)
