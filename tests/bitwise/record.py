"""What a training run writes down of itself, step by step, and the comparison of two runs."""

from __future__ import annotations

import hashlib
import json
import os
import random
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

STEPS, END = "steps.jsonl", "end.json"
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
"""Of trainer and engines; they share the first GPU. Trainers keep float32 weights; engines on a GPU have bfloat16."""
ENGINE_DTYPE = "bfloat16" if GPU else "float32"


def deterministic() -> None:
    """Let torch compute the same in the same order, on one core or on a GPU."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # read when cuBLAS begins; without it matmuls are refused
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


class Record:
    """One run's, in a folder. A trainer that is killed and resumed goes on writing behind what it had written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def step(self, step: int, samples: Iterable[Any], loss: Any, norm: Any) -> None:
        """A step was taken. samples: of the batch, in order: RolloutResults, or (ids, versions, logprobs)."""
        found = [sample if isinstance(sample, tuple) else parts_of(sample) for sample in samples]
        line = {
            "step": step,
            "samples": [digest(*parts) for parts in found],
            "tokens": sum(len(parts[0]) for parts in found),
            "versions": sorted({int(version) for parts in found for version in parts[1]}),
            "loss": float(loss).hex(),
            "norm": float(norm).hex(),
            "at": time.time(),
        }
        with (self.folder / STEPS).open("a") as file:
            file.write(json.dumps(line) + "\n")

    def end(self, model: Any) -> None:
        """The run is over."""
        told = hashlib.sha256()
        for name, tensor in sorted(model.state_dict().items()):
            told.update(name.encode() + tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        draft = self.folder / "end.draft"
        draft.write_text(json.dumps({"weights": told.hexdigest()}))
        os.replace(draft, self.folder / END)


def parts_of(result: Any) -> tuple[Any, Any, Any]:
    """A result's tokens, the version of each, and their log-probabilities."""
    return result.token_ids, np.repeat(*np.array([*result.segments], dtype=np.int64).T), result.logprobs


def digest(ids: Any, versions: Any, logprobs: Any) -> str:
    """Of all bits of a sample."""
    told = hashlib.sha256()
    for values, dtype in ((ids, np.int32), (versions, np.int64), (logprobs, np.float32)):
        told.update(np.ascontiguousarray(values, dtype).tobytes())
    return told.hexdigest()[:16]


def steps_of(folder: Path) -> list[dict[str, Any]]:
    """What a run wrote, whole lines only: the last one may be torn."""
    path = folder / STEPS
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def differences(one: Path, other: Path) -> list[str]:
    """Where two runs part; none if they are one. A step that was taken again is compared as often as it was taken."""
    expected: dict[int, dict[str, Any]] = {}
    found: list[str] = []
    for folder in (one, other):
        for line in steps_of(folder):
            known = expected.setdefault(line["step"], line)
            for name in line.keys() - {"step", "at"}:
                if line[name] != known[name]:
                    found.append(f"step {line['step']}: {name} {_first(known[name], line[name])}")
    for folder in (one, other):
        if missing := expected.keys() - {line["step"] for line in steps_of(folder)}:
            found.append(f"{folder.name} lacks step {min(missing)}")
    ends = [json.loads((folder / END).read_text()) for folder in (one, other)]
    return found + [f"weights {ends[0]['weights']} and {ends[1]['weights']}"] * (ends[0] != ends[1])


def _first(one: Any, other: Any) -> str:
    if isinstance(one, list) and len(one) == len(other):
        at = next(place for place, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1])
        return f"[{at}] {one[at]} and {other[at]}"
    return f"{one} and {other}"
