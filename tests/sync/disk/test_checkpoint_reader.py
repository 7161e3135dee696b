"""What a checkpoint of safetensors files says of its tensors."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from rolloutmq.sync.disk.checkpoint import checkpoint_shapes, checkpoint_tensors


def test_names_shapes_and_dtypes_come_from_every_file_of_a_checkpoint(tmp_path: Path) -> None:
    assert checkpoint_shapes(str(tmp_path / "nothing")) == {}
    save_file({"a": torch.ones(1)}, tmp_path / "model-1.safetensors")
    save_file({"b": torch.ones(2, 3).bfloat16(), "c": torch.tensor(1.0)}, tmp_path / "model-2.safetensors")
    assert checkpoint_shapes(str(tmp_path)) == {"a": (1,), "b": (2, 3), "c": ()}
    found = {name: dtype for name, (dtype, _) in checkpoint_tensors(str(tmp_path)).items()}
    assert found == {"a": "float32", "b": "bfloat16", "c": "float32"}
