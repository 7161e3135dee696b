"""A pool as SkyRL's inference engine; see docs/skyrl.md."""

from .engine import SkyRLEngine
from .staging import IncompleteWeights
from .transfer_handle import WeightTransferHandle
from .types import (
    InferenceEngineInput,
    InferenceEngineOutput,
    NamedWeightsUpdateRequest,
    StreamingChunk,
    VersionSpan,
    group_outputs_by_prompt,
)

__all__ = [
    "IncompleteWeights",
    "InferenceEngineInput",
    "InferenceEngineOutput",
    "NamedWeightsUpdateRequest",
    "SkyRLEngine",
    "StreamingChunk",
    "VersionSpan",
    "WeightTransferHandle",
    "group_outputs_by_prompt",
]
