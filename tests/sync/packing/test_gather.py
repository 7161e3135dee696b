"""Sharded trainers: every part in its place, never all of it at once, and no rank left waiting for another."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.peers import gather_ranks

NAMES = [f"{layer}.{kind}" for layer in range(3) for kind in ("weight", "bias")]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each case returned, or how it failed, on both ranks of a trainer that torchrun started."""
    folder = tmp_path_factory.mktemp("ranks")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    run = subprocess.run(
        [*torchrun, gather_ranks.__file__, str(folder)], capture_output=True, text=True, timeout=150, check=False
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in (0, 1)]


def returned(ranks: list[dict[str, Any]], name: str) -> list[Any]:
    failed = [rank[name]["failed"] for rank in ranks if "failed" in rank[name]]
    assert not failed, "\n".join(failed)
    return [rank[name]["returned"] for rank in ranks]


@pytest.mark.parametrize(
    "name", ["training_goes_on", "a_stream_that_gathers_by_itself", "other_placements"], ids=lambda name: name
)
def test_every_bit(ranks: list[dict[str, Any]], name: str) -> None:
    """The cases compare digests with those of the model that was never sharded."""
    assert returned(ranks, name) == [None, None]


def test_fsdp2_in_uneven_shards(ranks: list[dict[str, Any]]) -> None:
    lead, other = returned(ranks, "fsdp2")
    assert lead["names"] == other["names"] == ["steps", *NAMES]
    assert lead["buckets"] > 1
    assert other["buckets"] == 0


def test_never_more_gathered_than_a_bucket_and_one_tensor(ranks: list[dict[str, Any]]) -> None:
    lead, other = returned(ranks, "never_the_whole_model")
    assert lead["calls"] == other["calls"] == 40
    assert 4096 <= lead["most"] <= 5 * 4096
    assert other["most"] == 4096


def test_dropped_tensors_are_not_gathered(ranks: list[dict[str, Any]]) -> None:
    names = [f"model.{name}" for name in NAMES if name.endswith("weight")]
    assert returned(ranks, "dropped_tensors_are_not_gathered") == [{"calls": 3, "names": names}] * 2


def test_a_collective_under_way_is_waited_for(ranks: list[dict[str, Any]]) -> None:
    assert returned(ranks, "a_collective_under_way") == [{"first": 0.0, "last": 1.0, "elements": 1 << 17}] * 2


def test_both_ranks_refuse_alike(ranks: list[dict[str, Any]]) -> None:
    assert returned(ranks, "a_name_twice") == ["InvalidField: tensors='0.weight': every name once"] * 2
    for said in returned(ranks, "without_storage"):
        assert said.startswith("InvalidField: tensors[w]=")


def test_a_lead_that_cannot_copy_keeps_nobody_waiting(ranks: list[dict[str, Any]]) -> None:
    assert returned(ranks, "the_lead_cannot_copy") == ["RuntimeError: no memory left", ""]


def test_a_lead_outside_of_the_mesh(ranks: list[dict[str, Any]]) -> None:
    first, second = returned(ranks, "a_mesh_without_the_lead")
    assert first["led by 0"].startswith("InvalidField: tensors[w]=")
    assert "has this rank in it" in first["led by 0"]
    assert (first["led by 1"], second["led by 0"], second["led by 1"]) == ("", "", "")
