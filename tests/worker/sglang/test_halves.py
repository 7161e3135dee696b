"""The two halves of an SGLang engine share what they say to each other, and nothing else."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOM = Path(__file__).resolve().parents[3] / "worker" / "sglang"
DOOR = {"ChildSetup", "restore_environment", "run_scheduler"}


def imports(folder: str) -> Iterator[tuple[str, list[str], str]]:
    """(file, module from worker/sglang on, name) of the imports of a folder's files that stay in worker/sglang."""
    here = [part for part in folder.split("/") if part]
    for path in sorted((ROOM / folder).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and 0 < node.level <= len(here) + 1:
                base = [*here[: len(here) - node.level + 1], *(node.module or "").split(".") * bool(node.module)]
                yield from ((path.name, base, name.name) for name in node.names)


@pytest.mark.parametrize(("folder", "shared"), [("inside", {"wire", "patches"}), ("calls", {"wire"})])
def test_a_room_imports_from_the_workers_half_only_what_is_shared(folder: str, shared: set[str]) -> None:
    found = [(file, base[:1] or [name]) for file, base, name in imports(folder)]
    assert found
    assert [each for each in found if each[1] not in [[name] for name in (folder, *shared)]] == []


def test_the_workers_half_starts_the_other_and_imports_nothing_else_of_it() -> None:
    found = [(file, base, name) for file, base, name in imports("") if base[:1] == ["inside"] or name == "inside"]
    assert found
    assert [each for each in found if each[1] != ["inside"] or each[2] not in DOOR] == []
