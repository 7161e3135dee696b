"""A trainer's weights as they come in: groups, requests and tensors. `receive`, which imports torch, has no door."""

from .request import (
    GroupInfo,
    NamedWeightsUpdateRequest,
    Update,
    read_adapter_request,
    read_group,
    read_update,
)
from .staged import IncompleteWeights, Shapes, StagedTensors

__all__ = [
    "GroupInfo",
    "IncompleteWeights",
    "NamedWeightsUpdateRequest",
    "Shapes",
    "StagedTensors",
    "Update",
    "read_adapter_request",
    "read_group",
    "read_update",
]
