"""Write docs/capabilities.md from docs/capabilities.toml and the results of test runs.

    python tools/capabilities.py out/tests.xml benchmarks/results/gpu-tests.xml

Each argument is a JUnit file that pytest wrote (`--junitxml`). The status of a row counts the cases of its tests: those
that passed, failed and were skipped in these runs, and tests that were not run.
"""

from __future__ import annotations

import re
import sys
import tomllib
import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "docs" / "capabilities.toml"
PAGE = ROOT / "docs" / "capabilities.md"
FIELDS = ("capability", "api", "cli", "where")
HEAD = """# Capabilities

What the pool can do, where you find it, and the tests that show it on real parts. `make capabilities` writes this
page from `capabilities.toml` and the results of a test run; do not edit it. *CPU*: `make test` shows it with real
SGLang on a CPU. *GPU*: `tests/gpu` shows it on a GPU host. The status counts cases of these tests, including skipped
ones and those that were not run.

| # | capability | API | command line | shown on | tests | status |
|---|---|---|---|---|---|---|
"""
Outcomes = dict[str, dict[str, int]]


def read_runs(files: Iterable[Path]) -> Outcomes:
    """For each test (file::function): the number of its cases that passed, failed and were skipped, over all runs."""
    outcomes: Outcomes = defaultdict(lambda: defaultdict(int))
    for file in files:
        for case in ET.parse(file).getroot().iter("testcase"):
            path = case.get("classname", "").replace(".", "/") + ".py"
            test = f"{path}::{case.get('name', '').partition('[')[0]}"
            bad = case.find("failure") is not None or case.find("error") is not None
            what = "failed" if bad else "skipped" if case.find("skipped") is not None else "passed"
            outcomes[test][what] += 1
    return outcomes


def status_of(tests: Iterable[str], outcomes: Outcomes) -> str:
    """The numbers of cases of these tests by result, the worst result first."""
    total: dict[str, int] = defaultdict(int)
    for test in tests:
        found = outcomes.get(test) or {"not run": 1}
        if found.get("passed"):  # skipped in the run on the host that lacks something, passed on the one that has it
            found = {what: count for what, count in found.items() if what != "skipped"}
        for what, count in found.items():
            total[what] += count
    return ", ".join(f"{total[what]} {what}" for what in ("failed", "not run", "skipped", "passed") if total[what])


def page(table: dict[str, Any], outcomes: Outcomes) -> str:
    """The page. Raises ValueError for a row that lacks something."""
    lines = []
    for row in table["row"]:
        empty = [name for name in (*FIELDS, "tests") if not row.get(name)]
        if empty:
            raise ValueError(f"row {row.get('number')} of {TABLE.name} has no {', '.join(empty)}")
        tests = "<br>".join(f"`{test.removeprefix('tests/')}`" for test in row["tests"])
        cells = [str(row["number"]), *(row[name].replace("|", "\\|") for name in FIELDS), tests]
        lines.append(f"| {' | '.join(cells)} | {row.get('status') or status_of(row['tests'], outcomes)} |")
    notes = table.get("notes", "").strip()
    return HEAD + "\n".join(lines) + "\n" + (f"\n{notes}\n" if notes else "")


def main(files: list[str]) -> int:
    outcomes = read_runs(Path(file) for file in files)
    text = page(tomllib.loads(TABLE.read_text()), outcomes)
    PAGE.write_text(text)
    rows = [line for line in text.splitlines() if re.match(r"\| \d", line)]
    bad = [line for line in rows if "failed" in line.rsplit("|", 2)[1]]
    print(f"{PAGE.relative_to(ROOT)}: {len(rows)} rows, {len(bad)} with failures")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
