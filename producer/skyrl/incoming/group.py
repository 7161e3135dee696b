"""Reads which broadcast group a trainer wants this process to join."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ....messages.errors import FeatureUnavailable, InvalidField


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
