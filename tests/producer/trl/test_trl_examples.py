"""The programs in examples/ in a short form, and the blocks of docs/trainers.md, as their readers run them."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rolloutmq.ops.books import read_books

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


@pytest.mark.parametrize("name", ["agent_tools", "async_loop", "lora", "trl_async_grpo", "trl_grpo"])
def test_an_example_prints_its_curve(name: str, reader: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert len(re.findall(r"^step +\d+  reward 0\.\d\d  #+$", printed, re.MULTILINE)) == STEPS
    assert "last steps: reward 0." in printed


def check_recipe(printed: str) -> None:
    """The curve, and what the page says is printed below it."""
    assert len(re.findall(r"^step +\d+  reward [01]\.\d\d  #*$", printed, re.MULTILINE)) == STEPS
    assert "last steps: reward" in printed


def test_the_recipe_for_one_gpu(
    reader: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TAUGHT", "2")
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "gsm8k"))
    runpy.run_path(str(ROOT / "examples" / "gsm8k" / "one_gpu.py"), run_name="__main__")
    printed = capsys.readouterr().out
    check_recipe(printed)
    assert "importance ratio 1.00" in printed


def test_the_recipe_for_a_box_of_eight(reader: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the page says, with two ranks and one worker. It needs an answer that is right now and then."""
    monkeypatch.setenv("TAUGHT", "40")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    program = str(ROOT / "examples" / "gsm8k" / "eight_gpus.py")
    done = subprocess.run([*command, program], capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    check_recipe(done.stdout)
    assert f"{STEPS * 64} samples trained" in done.stdout


def test_the_page_runs(reader: Path) -> None:
    *blocks, _ = blocks_of_the_page()
    names: dict[str, Any] = {"__name__": "trainers.md"}
    for block in blocks:
        exec(compile(block, "trainers.md", "exec"), names)
    assert names["worker"].books.trained == 2 * 8
    assert names["trainer"].state.global_step == 2


def test_the_loop_with_checkpoints_goes_on_where_it_was_cut_off(reader: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends between its second step and that step's checkpoint, and is started again."""
    block, save = blocks_of_the_page()[-1], torch.save
    steps: list[int] = []

    def save_once(state: Any, path: Path) -> None:
        steps.append(state["feed"]["books"]["updates"])
        if steps == [1, 2]:
            raise SystemExit
        save(state, path)

    monkeypatch.setattr(torch, "save", save_once)
    with pytest.raises(SystemExit):
        exec(compile(block, "trainers.md", "exec"), {})
    names: dict[str, Any] = {}
    exec(compile(block, "trainers.md", "exec"), names)
    assert steps[:3] == [1, 2, 2], "the second step is done again"
    books, kept = names["feed"].books, read_books("FILE", reader / "out" / "run-7.pt")
    assert books.trained + books.dropped.total() == books.accepted == STEPS * 64
    assert kept.state_dict() == books.state_dict()


def blocks_of_the_page() -> list[str]:
    page = (ROOT / "docs" / "trainers.md").read_text()
    return re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
