"""The protocol between a worker and its inference engine. A new engine implements `Engine`."""

from .loaded_adapters import FEATURE, NOT_ENABLED, AdapterMissing, AdapterUse, LoadedAdapters, adapter_names, check
from .protocol import (
    NOTHING_MORE,
    Engine,
    EngineInfo,
    EngineOutput,
    EngineRequest,
    FinishReason,
    Generated,
    MatchedStop,
    Wanted,
)
from .tasks import POOLING_FEATURES, TASK_FEATURES, TaskOutput, TaskRequest

__all__ = [
    "FEATURE",
    "NOTHING_MORE",
    "NOT_ENABLED",
    "POOLING_FEATURES",
    "TASK_FEATURES",
    "AdapterMissing",
    "AdapterUse",
    "Engine",
    "EngineInfo",
    "EngineOutput",
    "EngineRequest",
    "FinishReason",
    "Generated",
    "LoadedAdapters",
    "MatchedStop",
    "TaskOutput",
    "TaskRequest",
    "Wanted",
    "adapter_names",
    "check",
]
