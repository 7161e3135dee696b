"""Files of ranks: how they are cut, and how pieces of tensors become whole; no engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rolloutmq.messages.model import TensorSpec
from rolloutmq.sync.disk import BrokenSnapshot, NoSuchSnapshot
from rolloutmq.sync.plan import PlanImpossible
from rolloutmq.worker.sglang.inside import sharded

WHOLE = torch.arange(24.0).view(4, 6)


def spec(name: str, dtype: str = "float32") -> TensorSpec:
    return TensorSpec(name=name, dtype=dtype, shape=(4, 6), bucket=0, offset=0, nbytes=96, digest="0" * 16)


def piece(name: str, view: torch.Tensor) -> tuple[str, torch.Tensor]:
    return json.dumps([name, view.storage_offset(), view.shape, view.stride()]), view.clone()


def test_a_tensor_is_never_cut_and_a_larger_one_is_alone(tmp_path: Path) -> None:
    sizes = {"a": 10, "b": 14, "c": 1, "d": 100, "e": 2, "f": 22}
    names = sharded.write(((n, torch.ones(size)) for n, size in sizes.items()), tmp_path, 3, "{part}of{rank}.x", 96)
    assert names == [f"{part}of3.x" for part in range(4)]
    assert [sorted(load_file(tmp_path / name)) for name in names] == [["a", "b"], ["c"], ["d"], ["e", "f"]]


def test_pieces_are_joined_by_their_places_however_ranks_hold_them(tmp_path: Path) -> None:
    """Rows, columns, and what several ranks have."""
    for rank in range(2):
        rows, columns = WHOLE[2 * rank : 2 * rank + 2], WHOLE[:, 3 * rank : 3 * rank + 3]
        sharded.write([piece("rows", rows), piece("columns", columns), piece("both", WHOLE)], tmp_path, rank)
    found = dict(sharded.joined([spec(name) for name in ("columns", "both", "nowhere", "rows")], tmp_path))
    assert list(found) == ["columns", "both", "rows"]
    assert all(tensor.equal(WHOLE) for tensor in found.values())


@pytest.mark.parametrize(
    ("views", "dtype"), [([WHOLE[:2]], "float32"), ([WHOLE[:, 2:], WHOLE[:, :1]], "float32"), ([WHOLE], "int32")]
)
def test_a_tensor_with_a_part_missing_is_refused(views: list[torch.Tensor], dtype: str, tmp_path: Path) -> None:
    for rank, view in enumerate(views):
        sharded.write([piece("w", view)], tmp_path, rank)
    with pytest.raises(PlanImpossible, match=r"do not hold w whole .* 'sharded'"):
        list(sharded.joined([spec("w", dtype)], tmp_path))


UP = '{"digests": {}, "pattern": "../r{rank}-p{part}.safetensors"}'


@pytest.mark.parametrize(
    "note", ["[]", "{", '{"digests": {}, "pattern": "{who}"}', '{"digests": {}, "pattern": "{0}"}', UP]
)
def test_a_note_that_is_none_is_refused(note: str, tmp_path: Path) -> None:
    (tmp_path / "rolloutmq-rank-0.json").write_text(note)
    with pytest.raises(BrokenSnapshot, match=r"rolloutmq-rank-0\.json"):
        sharded.Shards(torch.nn.Linear(1, 1), tmp_path, 0)


def test_files_are_looked_for_under_the_names_in_the_note(tmp_path: Path) -> None:
    (tmp_path / "rolloutmq-rank-1.json").write_text('{"digests": {}, "pattern": "p{part}-r{rank}.safetensors"}')
    sharded.write([("weight", torch.ones(1, 1))], tmp_path, 1)
    with pytest.raises(NoSuchSnapshot, match=r"no file of rank 1: p\{part\}-r\{rank\}.safetensors"):
        sharded.Shards(torch.nn.Linear(1, 1), tmp_path, 1)
