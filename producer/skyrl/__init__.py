"""A pool as SkyRL's inference engine; see docs/skyrl.md."""

from .engine import SkyRLEngine
from .incoming import IncompleteWeights, NamedWeightsUpdateRequest
from .outputs import InferenceEngineOutput, StreamingChunk, VersionSpan, group_outputs_by_prompt
from .requests import InferenceEngineInput
from .weights import WeightTransferHandle

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
