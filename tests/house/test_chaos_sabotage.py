"""Scenarios of the chaos suite find the defects that they are about: each runs once on a package that has one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from chaos import sabotage, scenarios
from chaos.scenario import ALL

TESTS = Path(__file__).parents[1]


def test_every_scenario_is_in_the_docs() -> None:
    scenarios.load()
    told = (TESTS / "chaos" / "README.md").read_text()
    assert [name for name in ALL if f"`{name}`" not in told] == []


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("what", sabotage.SABOTAGES)
def test_what_is_taken_out_is_missed(what: str, tmp_path: Path) -> None:
    one = sabotage.SABOTAGES[what]
    paths = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    for seed in "123":  # on a busy host a fault may come when it does no harm
        ran = subprocess.run(
            [sys.executable, "-m", "chaos", "--only", one.scenario, "--seed", seed, "--minutes", "0.1"],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": paths, sabotage.VARIABLE: what},
            capture_output=True,
            text=True,
            check=False,
        )
        if ran.returncode:
            break
    assert ran.returncode == 1, ran.stdout + ran.stderr
    violations = json.loads((tmp_path / "out" / "chaos.json").read_text())[one.scenario]["violations"]
    assert any(re.search(one.says, violation) for violation in violations), violations
