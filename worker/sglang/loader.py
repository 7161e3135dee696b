"""The request that has SGLang call a weight loader of this package's between two batches."""

from __future__ import annotations

import pickle
from typing import Any

import torch


def loader_request(loader: str, text: str, tp_size: int) -> Any:
    """For `loader(model, [(text, tensor)])` on every tensor-parallel rank; the tensor's one element is the rank.

    loader: "module.function", one of the engine's custom_weight_loader.
    """
    from sglang.srt.managers import io_struct  # noqa: PLC0415 – only where an engine or its scheduler runs

    # Pickled by value: the usual way shares the tensor through a file descriptor that this process must keep open.
    payloads = [pickle.dumps([(text, torch.tensor([rank]))]) for rank in range(tp_size)]
    return io_struct.UpdateWeightsFromTensorReqInput(
        serialized_named_tensors=payloads,  # each rank unpacks its own
        load_format=loader,
        flush_cache=False,  # a refused flush would end the scheduler; versions are kept apart by `extra_key`
    )
