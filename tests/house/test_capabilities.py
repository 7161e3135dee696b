"""The tables of capabilities and of engines' items: complete, their tests exist, and pages say what test runs said."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import tomllib
from collections import Counter
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import rolloutmq
from rolloutmq.ops.cli.main import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location("capabilities", ROOT / "tools" / "capabilities.py")
capabilities: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(capabilities)
TABLE = tomllib.loads(capabilities.TABLE.read_text())
ENGINES = tomllib.loads(capabilities.ENGINES.read_text())
ROOMS = ("messages", "sync", "producer", "worker", "ops")
RUN = """<testsuites><testsuite>
<testcase classname="tests.unit.test_a" name="test_one[x]"/>
<testcase classname="tests.unit.test_a" name="test_one[y-[0]]"><failure message="m"/></testcase>
<testcase classname="tests.gpu.test_b" name="test_two"><skipped/></testcase>
<testcase classname="tests.unit.test_a" name="test_three"/>
</testsuite></testsuites>"""


@pytest.fixture
def outcomes(tmp_path: Path) -> Any:
    (tmp_path / "run.xml").write_text(RUN)
    return capabilities.read_runs([tmp_path / "run.xml"])


def test_every_capability_has_its_row() -> None:
    assert [row["number"] for row in TABLE["row"]] == list(range(1, 47))


@cache
def functions(file: str) -> set[str]:
    return {node.name for node in ast.walk(ast.parse((ROOT / file).read_text())) if hasattr(node, "name")}


@pytest.mark.parametrize("row", TABLE["row"] + ENGINES["item"], ids=lambda row: row.get("item", row.get("number")))
def test_the_tests_of_a_row_exist(row: dict[str, Any]) -> None:
    tests = row.get("tests", [])
    assert len(set(tests)) == len(tests)
    for file, _, name in (test.partition("::") for test in tests):
        assert name in functions(file), f"{file}::{name}"


def test_the_page_has_the_rows_of_the_table() -> None:
    without_status = re.compile(r"\|[^|]*\|$", re.MULTILINE)
    expected = capabilities.page(TABLE, {})
    there = capabilities.PAGE.read_text()
    assert without_status.sub("|", there) == without_status.sub("|", expected), "run make capabilities"


def test_the_page_of_the_engines_has_the_items_of_the_table_and_counts_them() -> None:
    there = capabilities.ENGINES_PAGE.read_text()
    results = re.compile(r"\|(whole|not shown)\|[^|]*\|$|^\*\*.*\*\*$", re.MULTILINE)
    assert results.sub("", there) == results.sub("", capabilities.engines_page(ENGINES, {})), "run make capabilities"
    states = Counter(line.split("|")[3] for line in there.splitlines() if re.match(r"\|(?!-|section)", line))
    found = re.search(r"^\*\*(\d+) items: (.*)\.\*\*$", there, re.MULTILINE)
    assert found
    told = {state: int(count) for count, _, state in (one.partition(" ") for one in found[2].split(", "))}
    assert (told, int(found[1])) == (states, len(ENGINES["item"]))


def test_an_item_is_whole_only_if_its_tests_passed(outcomes: Any) -> None:
    one = {"document": "d", "section": "s", "item": "i", "state": "whole"}
    for name, said in (("three", "1 whole"), ("one", "1 not shown"), ("four", "1 not shown")):
        page = capabilities.engines_page({"item": [one | {"tests": [f"tests/unit/test_a.py::test_{name}"]}]}, outcomes)
        assert f"**1 items: {said}.**" in page
    for wrong in ({}, {"state": "part"}, {"state": "done", "reason": "r"}):
        with pytest.raises(ValueError, match="a state of"):
            capabilities.engines_page({"item": [one | wrong]}, {})


def test_every_command_has_a_row() -> None:
    shown = {name for row in TABLE["row"] for name in re.findall(r"`rolloutmq ([\w-]+)", row["cli"])}
    assert shown == set(COMMANDS)


def test_every_name_of_the_api_is_there() -> None:
    """A name that begins with a dot has the class or module of the name before it."""
    for row in TABLE["row"]:
        parent = ""
        for name in re.findall(r"`([\w.]+)[^`]*`", row["api"]):
            whole = parent + name if name.startswith(".") else name
            parent = whole.rpartition(".")[0]
            assert is_there(whole), f"row {row['number']}: {name}"


def is_there(name: str) -> bool:
    """Whether there is such a module, or such a thing in one: also a field or a method of a class."""
    parts, place = name.split("."), ROOT
    while parts and ((place / parts[0]).is_dir() or (place / f"{parts[0]}.py").exists()):
        place /= parts.pop(0)
    if not parts:
        return True  # without importing it: it may need an extra
    found: Any = import_module(".".join(("rolloutmq", *place.relative_to(ROOT).parts)))
    for part in parts:
        fields = {**getattr(found, "model_fields", {}), **getattr(found, "__dataclass_fields__", {})}
        if not hasattr(found, part) and part not in fields:
            return False
        found = getattr(found, part, None)
    return True


def test_every_public_method_is_documented_and_nothing_is_left_open() -> None:
    kinds = [kind for name in rolloutmq.__all__ if inspect.isclass(kind := getattr(rolloutmq, name))]
    methods = [(kind, it) for kind in kinds for it in dict(inspect.getmembers(kind, inspect.isfunction)).values()]
    own = [(kind, it) for kind, it in methods if it.__module__.startswith("rolloutmq") and it.__name__[0] != "_"]
    assert len(own) > 150
    assert [f"{kind.__name__}.{it.__name__}" for kind, it in own if not inspect.getdoc(it)] == []
    sources = [path for room in ROOMS for path in (ROOT / room).rglob("*.py")]
    assert [path for path in sources if re.search(r"#.*\b(TODO|FIXME|XXX|HACK|BUG)\b", path.read_text())] == []


def test_no_row_is_said_to_pass_without_a_run(outcomes: Any) -> None:
    assert capabilities.status_of(["tests/unit/test_a.py::test_none"], outcomes) == "1 not run"


def test_the_worst_comes_first(outcomes: Any) -> None:
    names = [f"tests/unit/test_a.py::test_{name}" for name in ("one", "three")]
    assert capabilities.status_of(names, outcomes) == "1 failed, 2 passed"


def test_a_skipped_test_counts_as_passed_only_where_it_ran(outcomes: Any, tmp_path: Path) -> None:
    test = "tests/gpu/test_b.py::test_two"
    assert capabilities.status_of([test], outcomes) == "1 skipped"
    (tmp_path / "gpu.xml").write_text('<testsuite><testcase classname="tests.gpu.test_b" name="test_two"/></testsuite>')
    runs = capabilities.read_runs([tmp_path / "run.xml", tmp_path / "gpu.xml"])
    assert capabilities.status_of([test], runs) == "1 passed"


def test_a_row_that_lacks_something_is_refused() -> None:
    with pytest.raises(ValueError, match="has no cli, tests"):
        capabilities.page({"row": [{"number": 1, "capability": "a", "api": "b", "where": "CPU"}]}, {})
