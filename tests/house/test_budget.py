"""The package stays as small as `budget.toml` says: `python tests/house/test_budget.py` prints what there is."""

from __future__ import annotations

import ast
import io
import re
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FLOORS = ("messages", "sync", "producer", "worker", "ops")
PLAIN = {".lua", ".js", ".css", ".html"}
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING}
SPARE = 0.02
"""By so much a number may be above what there is. A landing that saves more lowers it."""
PRIVATE = re.compile(r"(?<!\bself)(?<!\bcls)(?<!\bsuper\(\))\._[a-z]\w*")


def files(folder: str, *suffixes: str) -> Iterator[Path]:
    return (path for path in (ROOT / folder).rglob("*") if path.suffix in suffixes and "__pycache__" not in path.parts)


def documented(tree: ast.AST) -> set[int]:
    """The lines of docstrings, also of those behind a variable."""
    found: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            found.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return found


def code_lines(text: str) -> int:
    """Lines of Python without blanks, comments and docstrings."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE and token.type != tokenize.ENDMARKER:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - documented(ast.parse(text)))


def lines_of(folder: str) -> int:
    python = sum(code_lines(path.read_text()) for path in files(folder, ".py"))
    return python + sum(bool(line.strip()) for path in files(folder, *PLAIN) for line in path.read_text().splitlines())


def classes() -> int:
    trees = (ast.parse(path.read_text()) for floor in FLOORS for path in files(floor, ".py"))
    return sum(isinstance(node, ast.ClassDef) for tree in trees for node in ast.walk(tree))


def leaves() -> int:
    """Commands of the command line that have no commands of their own."""
    from rolloutmq.ops.cli.main import COMMANDS, load  # noqa: PLC0415 – imports every command

    def below(command: Any) -> int:
        return sum(map(below, getattr(command, "commands", {}).values())) or 1

    return sum(below(load(name)) for name in COMMANDS)


def words() -> int:
    return sum(len(path.read_text().split()) for path in [ROOT / "README.md", *files("docs", ".md")])


def measured() -> dict[str, float]:
    floors: dict[str, float] = {floor: lines_of(floor) for floor in FLOORS}
    return floors | {
        "benchmarks": lines_of("benchmarks"),
        "classes": classes(),
        "leaves": leaves(),
        "words": words(),
        "tests": lines_of("tests"),
        "privates": sum(len(PRIVATE.findall(path.read_text())) for path in files("tests", ".py")),
    }


BUDGET: dict[str, Any] = tomllib.loads((ROOT / "budget.toml").read_text())
WALK: dict[str, int] = BUDGET.pop("walk")
"""Held by `test_walk.py`, which runs a pool."""


@pytest.fixture(scope="module")
def there() -> dict[str, float]:
    return measured()


@pytest.mark.parametrize("name", BUDGET)
def test_the_budget_is_kept_and_lowered(there: dict[str, float], name: str) -> None:
    assert there[name] <= BUDGET[name], "more needs a commit of its own that says who gains"
    assert there[name] >= BUDGET[name] * (1 - SPARE), "lower it to what there is"


def test_what_counts_as_code() -> None:
    text = '"""Says."""\n\nX = 1\n"""What it is."""\n\n\ndef f() -> str:\n    # why\n    return """a\n    b"""\n'
    assert code_lines(text) == 4


if __name__ == "__main__":
    print("\n".join(f"{name} = {value}" for name, value in measured().items()))
