"""A pool as SkyRL's inference engine; see docs/skyrl.md."""

from .control import MemoryTag
from .engine import SkyRLEngine
from .incoming import IncompleteWeights, NamedWeightsUpdateRequest
from .outputs import InferenceEngineOutput, StreamingChunk, VersionSpan, group_outputs_by_prompt
from .requests import InferenceEngineInput, create_rl_logit_processor, parse_rl_logit_processor
from .weights import WeightTransferHandle

__all__ = [
    "IncompleteWeights",
    "InferenceEngineInput",
    "InferenceEngineOutput",
    "MemoryTag",
    "NamedWeightsUpdateRequest",
    "SkyRLEngine",
    "StreamingChunk",
    "VersionSpan",
    "WeightTransferHandle",
    "create_rl_logit_processor",
    "group_outputs_by_prompt",
    "parse_rl_logit_processor",
]
