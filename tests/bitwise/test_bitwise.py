"""Twenty steps with real engines, undisturbed and twice under faults: equal to the last bit."""

from __future__ import annotations

import asyncio
from importlib.util import find_spec
from pathlib import Path

import pytest

from rolloutmq.ops.replay.checks import diff

from .__main__ import Plan, compare
from .faults import FAULTS, drawn

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]


def test_two_runs_with_faults_are_the_undisturbed_one(tmp_path: Path) -> None:
    if find_spec("sglang") is None:
        pytest.skip("SGLang is not installed")
    found = asyncio.run(compare("own", tmp_path, Plan(steps=20, runs=2, seed="ci")))
    first, *others = found["told"]
    for run in others:
        assert (run["differences"], run["weights"], run["steps"]) == ([], first["weights"], 20), run
        assert len(run["faults"]) == len(FAULTS) + 1
    journals = [str(tmp_path / "own" / run["run"] / "journal") for run in found["told"]]
    assert [diff((journals[0], journal), lambda _: None).parts for journal in journals] == ["", "", ""]


def test_faults_follow_from_the_seed() -> None:
    assert drawn("1", 20) == drawn("1", 20) != drawn("2", 20)
    assert {stroke.name for stroke in drawn("1", 20)} == {fault.__name__ for fault in FAULTS}
