"""Writers that are killed, and many processes in one folder: whatever is named a version is whole."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.peers import disk_crash

TESTS = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("kind", "numbers"),
    [
        pytest.param("every", [], marks=pytest.mark.slow),
        ("random", ["7", "25"]),
        pytest.param("traffic", ["40"], marks=pytest.mark.slow),
    ],
)
def test_no_half_version(kind: str, numbers: list[str], tmp_path: Path) -> None:
    command = [sys.executable, disk_crash.__file__, kind, str(tmp_path / "versions"), *numbers]
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    shown = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=170, check=False
    )
    assert shown.returncode == 0, shown.stderr
    assert int(shown.stdout) > (20 if kind != "random" else 1)  # system calls killed at, or versions written
