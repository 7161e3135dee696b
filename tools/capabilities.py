"""Write docs/capabilities.md from docs/capabilities.toml and the results of test runs.

    python tools/capabilities.py out/tests.xml benchmarks/results/gpu-tests.xml

Each argument is a JUnit file that pytest wrote (`--junitxml`). A row is given the status that these runs say its tests
the row names, and "not run" for a test that none of them ran.
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

What the pool can do, where it is found, and the tests that show it on real parts. Made by `make capabilities` from
`capabilities.toml` and the results of a test run; do not edit. *CPU*: shown by `make test` with real SGLang on a CPU.
*GPU*: by `tests/gpu` on a GPU host. Status counts cases of the tests named, those that were skipped or not run, too.

| # | capability | API | command line | shown on | tests | status |
|---|---|---|---|---|---|---|
"""
Outcomes = dict[str, dict[str, int]]


def read_runs(files: Iterable[Path]) -> Outcomes:
    """By test (file::function): how many of its cases passed, failed and were skipped, over all runs."""
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
    """What the runs say about these tests, the worst first."""
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
