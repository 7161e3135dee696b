"""A reward model's head as its checkpoint has it.

SGLang gives the heads of some models (Qwen2ForSequenceClassification and its like) a bias. Checkpoints have none, and
then its values are whatever the layer was made with: every score is off by a number that differs from engine to engine.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)
LOADER = "rolloutmq.worker.sglang.reward_head.clear"
HEAD = "score"


async def settle(manager: Any, model: str, tp_size: int) -> None:
    """Set to zero what the checkpoint `model` says nothing about in the head of a running engine."""
    if f"{HEAD}.bias" in checkpoint_names(model):
        return
    from . import compat as sglang_compat  # noqa: PLC0415  (seconds of imports; loaded by the engine's start)

    await sglang_compat.run_loader(manager, LOADER, HEAD, tp_size)


def clear(model: Any, named_tensors: Any) -> None:
    """SGLang's weight-loader hook, in its scheduler's process. Never raises: an exception here ends the engine."""
    ((name, _),) = list(named_tensors)
    bias = getattr(getattr(model, name, None), "bias", None)
    if bias is not None:
        bias.data.zero_()


def checkpoint_names(model: str) -> frozenset[str]:
    """Names of the tensors of a checkpoint: a folder, or what SGLang has fetched from the hub; empty if unknown."""
    from safetensors import safe_open  # noqa: PLC0415 – only for reward models

    folder = Path(model)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download  # noqa: PLC0415

        try:
            folder = Path(snapshot_download(model, local_files_only=True))
        except (OSError, ValueError) as error:
            logger.warning("%s cannot be looked into, its head is taken to have no bias: %s", model, error)
            return frozenset()
    for name in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
        if (index := folder / name).exists():
            return frozenset(json.loads(index.read_text())["weight_map"])
    found: set[str] = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="numpy") as tensors:
            found.update(tensors.keys())
    if not found and (pickled := folder / "pytorch_model.bin").exists():
        import torch  # noqa: PLC0415 – only for reward models

        found.update(torch.load(pickled, map_location="meta", weights_only=True))
    return frozenset(found)
