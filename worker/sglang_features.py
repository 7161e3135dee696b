"""Which optional parts of a job an SGLang engine honours, and by which of its settings."""

from __future__ import annotations

from .adapters import FEATURE as LORA
from .sglang_config import SGLangConfig


def features(config: SGLangConfig) -> frozenset[str]:
    """Names as in GenerateJob.unsupported."""
    return frozenset({LORA} if config.max_lora_rank is not None else ())
