"""The answer of /v1/models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def model_list(model: str, context_length: int, created: int, adapters: Sequence[str] = ()) -> dict[str, Any]:
    """The model, first, and each LoRA adapter as a model whose parent it is, as vLLM's servers show them.

    context_length: the most tokens of prompt and answer. created: Unix time in seconds.
    """

    def entry(name: str, parent: str | None) -> dict[str, Any]:
        made = {"id": name, "object": "model", "created": created, "owned_by": "rolloutmq"}
        return made | {"root": model, "parent": parent, "max_model_len": context_length}

    return {"object": "list", "data": [entry(model, None), *(entry(name, model) for name in adapters)]}
