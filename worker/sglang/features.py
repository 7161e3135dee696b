"""Which optional parts of a job an SGLang engine honours, and by which of its settings."""

from __future__ import annotations

from ...messages.model import GRAMMARS
from ..engine import FEATURE as LORA
from ..engine import TASK_FEATURES
from ..logit_processors import known_processors
from .config import SGLangConfig
from .inside.tokenizer import engine_tokenizer

LOGPROBS = ("logprobs.top", "logprobs.prompt", "logprobs.token_ids")
TOOLS = "tools"
"""Calls are read by SGLang's own parsers, in the worker."""


def features(config: SGLangConfig) -> frozenset[str]:
    """Names as in GenerateJob.unsupported."""
    if config.task != "generate":
        return frozenset({TASK_FEATURES[config.task]})
    found = {TASK_FEATURES["score"], TOOLS, *LOGPROBS, "stream"}
    if "speculative_algorithm" not in config.extra:  # SGLang then samples elsewhere
        found |= {"logprobs.kind", "logit_processors", "sampling.min_new_tokens"}
        found |= {f"logit_processors:{name}" for name in known_processors(config.logit_processors)}
    switched = {
        "hidden_states": config.hidden_states,
        "routed_experts": config.routed_experts,
        "seed": config.deterministic,
    }
    found |= {name for name, on in switched.items() if on}
    found.add("sampling.stop_token_sequences")
    if engine_tokenizer(config):
        found |= {f"sampling.{name}" for name in ("stop", "stop_regex", *GRAMMARS)}
    if config.max_lora_rank is not None:
        found.add(LORA)
    return frozenset(found)
