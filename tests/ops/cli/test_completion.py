"""Completion in a shell: commands, subcommands and options, though a command is imported when it is needed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rolloutmq.ops.cli.main import COMMANDS, app

ENTRY = f"#!{sys.executable}\nfrom rolloutmq.ops.entry import main\nmain()\n"


def offered(typed: str) -> list[str]:
    """What bash is given for the last word of `typed`."""
    words = {"COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split(" ")) - 1)}
    done = CliRunner().invoke(app, [], prog_name="rolloutmq", env={"_ROLLOUTMQ_COMPLETE": "complete_bash", **words})
    return done.stdout.split()


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("rolloutmq ", [*COMMANDS]),
        ("rolloutmq st", ["status"]),
        ("rolloutmq top --o", ["--once"]),
        ("rolloutmq top --once --j", ["--json"]),
        ("rolloutmq ops can", ["cancel"]),
        ("rolloutmq ops run --w", ["--wait"]),
        ("rolloutmq control pa", ["pause", "parameter"]),
        ("rolloutmq control pause --tim", ["--timeout"]),
        ("rolloutmq dead req", ["requeue"]),
        ("rolloutmq control profile st", ["start", "stop"]),
        ("rolloutmq worker --max-r", ["--max-running"]),
        ("rolloutmq nonsense --o", []),
    ],
)
def test_what_is_offered(typed: str, expected: list[str]) -> None:
    assert offered(typed) == expected


@pytest.mark.parametrize(
    ("typed", "but"),
    [
        ("rolloutmq st", {"redis", "rolloutmq.messages.errors", "rolloutmq.ops.cli.pool"}),
        ("rolloutmq top --o", {"redis", "numpy", "rolloutmq.messages.model", "rolloutmq.ops.top"}),
    ],
)
def test_no_more_is_loaded_than_is_needed(typed: str, but: set[str]) -> None:
    code = (
        "import sys; sys.argv = ['rolloutmq']\n"
        "from rolloutmq.ops.entry import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        f"assert not {but} & sys.modules.keys()"
    )
    words = {"COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split(" ")) - 1), "_ROLLOUTMQ_COMPLETE": "complete_bash"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | words, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()


def test_in_a_real_bash(tmp_path: Path) -> None:
    program = tmp_path / "rolloutmq"
    program.write_text(ENTRY)
    program.chmod(0o755)
    script = (
        'eval "$(_ROLLOUTMQ_COMPLETE=source_bash rolloutmq)"\n'
        "complete -p rolloutmq\n"
        'COMP_WORDS=(rolloutmq top --o) COMP_CWORD=2; _rolloutmq_completion rolloutmq; echo "${COMPREPLY[@]}"'
    )
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", script], env=os.environ | path, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["complete -o default -F _rolloutmq_completion rolloutmq", "--once"], done.stderr


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_scripts_for_other_shells(shell: str) -> None:
    asked = {"_ROLLOUTMQ_COMPLETE": f"source_{shell}"}
    script = CliRunner().invoke(app, [], prog_name="rolloutmq", env=asked).stdout
    assert f"_ROLLOUTMQ_COMPLETE=complete_{shell}" in script
    typed = {"_TYPER_COMPLETE_ARGS": "rolloutmq ops can", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    answer = CliRunner().invoke(
        app, [], prog_name="rolloutmq", env={"_ROLLOUTMQ_COMPLETE": f"complete_{shell}", **typed}
    )
    assert "cancel" in answer.stdout
    assert "list" not in answer.stdout
