"""Which experts tokens go to, on SGLang's CPU path: its record of them wants memory that a GPU can reach.

Imports SGLang: only for its scheduler process, after :func:`.cpu_support.prepare_engine`.
"""

from __future__ import annotations

from typing import Any

import torch


def install() -> None:
    """Into this process. Releases that pin the memory through torch itself cannot record experts on a CPU."""
    from sglang.srt.state_capturer import base  # noqa: PLC0415

    if hasattr(base, "ALLOC_MEMORY_FUNCS"):
        base.ALLOC_MEMORY_FUNCS = {**base.ALLOC_MEMORY_FUNCS, "cpu": _allocate}


def _allocate(dims: tuple[int, ...], dtype: torch.dtype, device: str, **_pinning: Any) -> torch.Tensor:
    return torch.empty(dims, dtype=dtype, device=device)
