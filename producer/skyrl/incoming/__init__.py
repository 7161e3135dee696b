"""A trainer's weights as they come in: groups, requests and tensors. `receive`, which imports torch, has no door."""

from .group import GroupInfo, read_group
from .request import NamedWeightsUpdateRequest, Update, read_adapter_request, read_update
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
