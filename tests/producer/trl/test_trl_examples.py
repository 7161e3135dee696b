"""The programs in examples/ in a short form, and the blocks of docs/trainers.md, as their readers run them."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from support.trainers.trl import trl  # noqa: F401 – transformers is imported after its preparation

ROOT = Path(__file__).resolve().parents[3]
STEPS = 2
pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300), pytest.mark.usefixtures("trl_worker")]


@pytest.fixture
def reader(tiny: Path, trl_redis: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the tiny model where the programs look for it."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "tiny").symlink_to(tiny)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ROLLOUTMQ_REDIS", trl_redis)
    monkeypatch.setenv("STEPS", str(STEPS))
    return tmp_path


@pytest.mark.parametrize("name", ["async_loop", "lora", "trl_async_grpo", "trl_grpo"])
def test_an_example_prints_its_curve(name: str, reader: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert len(re.findall(r"^step +\d+  reward 0\.\d\d  #+$", printed, re.MULTILINE)) == STEPS
    assert "last steps: reward 0." in printed


def test_the_page_runs(reader: Path) -> None:
    page = (ROOT / "docs" / "trainers.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert blocks[-1] == (ROOT / "examples" / "async_loop.py").read_text()
    names: dict[str, Any] = {"__name__": "trainers.md"}
    for block in blocks[:-1]:
        exec(compile(block, "trainers.md", "exec"), names)
    assert names["worker"].books.trained == 2 * 8
    assert names["trainer"].state.global_step == 2
