"""The table of capabilities: complete, its tests exist, and its page says what test runs said."""

from __future__ import annotations

import ast
import importlib.util
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location("capabilities", ROOT / "tools" / "capabilities.py")
capabilities: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(capabilities)
TABLE = tomllib.loads((ROOT / "docs" / "capabilities.toml").read_text())
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
    assert [row["number"] for row in TABLE["row"]] == list(range(1, 39))


@pytest.mark.parametrize("row", TABLE["row"], ids=lambda row: str(row["number"]))
def test_the_tests_of_a_row_exist(row: dict[str, Any]) -> None:
    assert len(set(row["tests"])) == len(row["tests"])
    for test in row["tests"]:
        file, _, name = test.partition("::")
        functions = {node.name for node in ast.walk(ast.parse((ROOT / file).read_text())) if hasattr(node, "name")}
        assert name in functions, test


def test_the_page_has_the_rows_of_the_table() -> None:
    without_status = re.compile(r" \| [^|]* \|$", re.MULTILINE)
    expected = capabilities.page(TABLE, {})
    there = capabilities.PAGE.read_text()
    assert without_status.sub(" |", there) == without_status.sub(" |", expected), "run make capabilities"


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
