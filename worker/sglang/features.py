"""Which optional parts of a job an SGLang engine supports, by its settings and its model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...messages.errors import ConfigError
from ...messages.model import GRAMMARS
from ..engine import FEATURE as LORA
from ..engine import TASK_FEATURES
from ..logit_processors import known_processors
from .config import SGLangConfig

LOGPROBS = ("logprobs.top", "logprobs.prompt", "logprobs.token_ids")
TOOLS = "tools"
"""Feature: the worker reads tool calls with SGLang's parsers."""
MEDIA = "media"
"""Feature: the model takes images, video or audio, and SGLang can prepare them."""
FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "tiktoken.model", "tekken.json")
"""A model directory with none of these has no tokenizer."""


def features(config: SGLangConfig, manager: Any) -> frozenset[str]:
    """Return the names of features, as in GenerateJob.unsupported. manager: the running engine's tokenizer manager."""
    media = {MEDIA} if getattr(manager, "mm_processor", None) is not None else set()
    if config.task != "generate":
        return frozenset({TASK_FEATURES[config.task], *media})
    found = {*media, TASK_FEATURES["score"], TOOLS, *LOGPROBS, "stream"}
    if "speculative_algorithm" not in config.extra:  # with one SGLang does not use this package's sampler
        found |= {"logprobs.kind", "logit_processors", "sampling.min_new_tokens"}
        found |= {f"logit_processors:{name}" for name in known_processors(config.logit_processors)}
    found |= {name for name in ("hidden_states", "routed_experts") if getattr(config, name)}
    if config.deterministic:
        found.add("seed")
    found.add("sampling.stop_token_sequences")
    if engine_tokenizer(config):
        found |= {f"sampling.{name}" for name in ("stop", "stop_regex", *GRAMMARS)}
    if config.max_lora_rank is not None:
        found.add(LORA)
    return frozenset(found)


def engine_tokenizer(config: SGLangConfig) -> str:
    """Return the path of the engine's tokenizer, "" for none. Raises ConfigError if it must have one and has none."""
    if config.tokenizer == "off" or config.task != "generate":
        return ""
    path = str(config.extra.get("tokenizer_path") or config.model)
    folder = Path(path)
    # A model of the hub is taken to have a tokenizer. It may not be downloaded yet.
    found = not folder.is_dir() or any((folder / name).is_file() for name in FILES)
    if not found and config.tokenizer == "on":
        raise ConfigError(f"tokenizer='on': {path} has none of {', '.join(FILES)}; allowed: 'auto' or 'off'")
    return path if found else ""
