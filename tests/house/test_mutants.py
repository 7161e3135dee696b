"""Mutants still apply, and the long tests kill each of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from mutants import MUTANTS, ROOT


def test_every_mutant_applies_and_has_its_test() -> None:
    wrong: list[str] = []
    for mutant in MUTANTS:
        file, _, name = mutant["test"].partition("::")
        applies = (ROOT / mutant["file"]).read_text().count(mutant["text"]) == 1
        if not applies or f"def {name}(" not in (ROOT / file).read_text():
            wrong.append(mutant["breaks"])
    assert wrong == []
    assert len({mutant["breaks"] for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_mutant_is_killed() -> None:
    ran = subprocess.run(
        [sys.executable, Path(__file__).with_name("mutants.py")], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout
