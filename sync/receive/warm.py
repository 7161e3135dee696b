"""What is slow the first time, done before anybody waits for it."""

from __future__ import annotations

import importlib
from functools import cache

import torch

from ..tensors import Copies, Digester


@cache
def warm_up(device: torch.device) -> None:
    """Whatever the first commit would otherwise stand still for, while the old weights serve; once in a process."""
    importlib.import_module("torch._dynamo")  # seconds; torch wants it when the first copy plan is recorded
    if device.type == "cuda":  # compiles the kernels
        sample = torch.zeros(1 << 20, dtype=torch.bfloat16, device=device)
        found, bad = torch.zeros(1, dtype=torch.int64, device=device), torch.zeros(1, dtype=torch.int32)
        Digester([sample]).run(found)
        Digester([sample]).run(found, bad.to(device))
        Copies([(torch.empty_like(sample), sample)], often=True).run()
