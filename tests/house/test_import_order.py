"""Who may import whom: messages <- sync <- producer, worker <- ops. And a trainer's imports stay light."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAY_IMPORT = {
    "messages": set(),
    "sync": {"messages"},
    "producer": {"messages", "sync"},
    "worker": {"messages", "sync"},
    "ops": {"messages", "sync", "producer", "worker"},
}
MODULES = sorted(path for folder in MAY_IMPORT for path in (ROOT / folder).rglob("*.py"))


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """(line, absolute name) of every import in a module, inside functions and type-checking blocks too."""
    package = ["rolloutmq", *path.relative_to(ROOT).parent.parts]
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, f"absolute {name.name}") for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level == 0:
                yield node.lineno, f"absolute {node.module}"
                continue
            assert node.level <= len(package), f"{path}:{node.lineno} leaves the package"
            base = package[: len(package) - node.level + 1] + (node.module or "").split(".") * bool(node.module)
            # `from .. import sync` names the subpackage last, `from ..sync import x` does not: both are covered.
            yield from ((node.lineno, ".".join([*base, name.name])) for name in node.names)


def offences(path: Path) -> list[str]:
    folder = path.relative_to(ROOT).parts[0]
    allowed = MAY_IMPORT[folder] | {folder}
    found = []
    for line, name in imported(path):
        if name.startswith("absolute "):
            if name.removeprefix("absolute ").split(".")[0] == "rolloutmq":
                found.append(f"{path.relative_to(ROOT)}:{line}: inside the package imports are relative")
        elif (target := name.split(".")[1]) in MAY_IMPORT and target not in allowed:
            found.append(f"{path.relative_to(ROOT)}:{line}: {folder} may not import {target}")
    return found


def test_every_module_keeps_to_the_order() -> None:
    assert MODULES
    assert [offence for path in MODULES for offence in offences(path)] == []


@pytest.mark.parametrize(
    ("statement", "count"),
    [
        ("from ..messages import ids", 0),
        ("from .. import messages", 0),
        ("from . import own", 0),
        ("import redis.asyncio", 0),
        ("from ..ops import cli", 1),
        ("from .. import ops, worker", 2),
        ("def f():\n    from ..producer.client import C", 1),
        ("import rolloutmq.messages", 1),
        ("from rolloutmq.messages import ids", 1),
    ],
)
def test_the_rule_sees_every_form(statement: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sync").mkdir()
    module = tmp_path / "sync" / "made_up.py"
    module.write_text(statement)
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    assert len(offences(module)) == count


@pytest.mark.parametrize("module", ["rolloutmq", "rolloutmq.messages", "rolloutmq.producer", "rolloutmq.worker"])
def test_a_trainer_imports_nothing_heavy(module: str) -> None:
    heavy = ["torch", "sglang", "transformers", "typer", "rich"]
    script = f"import sys, {module}; print([name for name in {heavy} if name in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"
