"""CUDA IPC by itself: how soon another process reads a bucket that it was handed, whatever the bucket's size."""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

import torch

from rolloutmq.sync.wire.ipc import export_handles, open_handles

from ..parts import BenchFailed, Part

SIZES = (1 << 20, 1 << 26, 1 << 30)


def read_handed(device: str) -> None:
    """A receiver's process: it opens each bucket of its input, and says when it has the first and the last byte."""
    where = torch.device(device)
    print(json.dumps(torch.zeros(1, device=where).tolist()), flush=True)
    for line in sys.stdin:
        size, raw = json.loads(line)
        (bucket,) = open_handles(bytes.fromhex(raw), where, [size])
        print(json.dumps([int(bucket[0]), int(bucket[-1])]), flush=True)
        del bucket


def measure_handles(device: str, rounds: int) -> dict[str, Any]:
    """MiB -> median milliseconds from the export of a bucket until the other process has told its first and last byte
    (`handed_ms`), and of a copy of it within the GPU (`copy_ms`). Each bucket is memory that was not handed before.

    Raises BenchFailed if a byte differs.
    """
    found: dict[str, Any] = {}
    with Part(read_handed, device) as other:
        other.line()
        for size in SIZES:
            handed, copied = [], []
            for number in range(rounds + 1):
                bucket = torch.full((size,), number % 251, dtype=torch.uint8, device=device)
                copied.append(_copy_ms(bucket))
                began = time.perf_counter()
                other.tell(json.dumps([size, export_handles([bucket]).hex()]))
                told = json.loads(other.line())
                handed.append((time.perf_counter() - began) * 1e3)
                if told != [number % 251] * 2:
                    raise BenchFailed(f"{told} came out of a bucket of {number % 251}")
                del bucket
                torch.cuda.empty_cache()
            # The first one loads kernels.
            figures = {"handed_ms": handed[1:], "copy_ms": copied[1:]}
            found[str(size >> 20)] = {name: round(statistics.median(times), 3) for name, times in figures.items()}
    return found


def _copy_ms(bucket: torch.Tensor) -> float:
    target = torch.empty_like(bucket)
    torch.cuda.synchronize()
    began = time.perf_counter()
    target.copy_(bucket)
    torch.cuda.synchronize()
    return (time.perf_counter() - began) * 1e3
