"""Write docs/capabilities.md and docs/engines.md from the .toml beside each, and the results of test runs.

    python tools/capabilities.py out/tests.xml benchmarks/results/gpu-tests.xml

Each argument is a JUnit file that pytest wrote (`--junitxml`). The status of a row counts the cases of its tests: those
that passed, failed and were skipped in these runs, and tests that were not run.
"""

from __future__ import annotations

import re
import sys
import tomllib
import xml.etree.ElementTree as ET
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "docs" / "capabilities.toml"
PAGE = ROOT / "docs" / "capabilities.md"
ENGINES = ROOT / "docs" / "engines.toml"
ENGINES_PAGE = ROOT / "docs" / "engines.md"
FIELDS = ("capability", "api", "cli", "where")
HEAD = """# Capabilities

What the pool can do, where you find it, and the tests that show it on real parts. `make capabilities` writes this
page from `capabilities.toml` and the results of a test run; do not edit it. *CPU*: `make test` shows it with real
SGLang on a CPU. *GPU*: `tests/gpu` shows it on a GPU host. The status counts cases of these tests, including skipped
ones and those that were not run.

|#|capability|API|command line|shown on|tests|status|
|-|-|-|-|-|-|-|
"""
ENGINES_HEAD = """# The engines it was modelled on, item by item

The pool was asked to do what SkyRL's and VERL's SGLang engines do. This is a count of its own over the five documents
that describe these: two verification reports of SkyRL's engine (*report*, *summary*), its *audit*, and the two guides.
An item is a method, a setting, an entry of a list, or a claim that can be checked. What a document only says again is
counted once, where it is said best; lists of tests and of deployments stay items of their own. `make capabilities`
writes this page from `engines.toml`, which names the tests of each item, and from the results of a test run; do not
edit it.

*whole*: tests show all of it, and passed; *not shown* if one did not, or was not run. *part*: the last column says what
is missing. *planned*, *not applicable*: it says why.

"""
STATES = ("whole", "part", "planned", "not applicable")
UNSHOWN = "not shown"
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
        lines.append(f"|{'|'.join(cells)}|{row.get('status') or status_of(row['tests'], outcomes)}|")
    notes = table.get("notes", "").strip()
    return HEAD + "\n".join(lines) + "\n" + (f"\n{notes}\n" if notes else "")


def engines_page(table: dict[str, Any], outcomes: Outcomes) -> str:
    """The page. An item is whole only if all of its tests passed. Raises ValueError for one that lacks something."""
    documents: dict[str, list[str]] = {}
    count: Counter[str] = Counter()
    for item in table["item"]:
        state = item.get("state")
        needed = ("document", "section", "item", "tests" if state == "whole" else "reason")
        if state not in STATES or not all(item.get(name) for name in needed):
            raise ValueError(f"{item} of {ENGINES.name}: a state of {STATES}, and {', '.join(needed)}")
        last = item["reason"] if state != "whole" else status_of(item["tests"], outcomes)
        if state == "whole" and not re.fullmatch(r"\d+ passed", last):
            state = UNSHOWN
        count[state] += 1
        documents.setdefault(item["document"], []).append(f"|{item['section']}|{item['item']}|{state}|{last}|")
    told = ", ".join(f"{count[state]} {state}" for state in (*STATES, UNSHOWN) if count[state])
    lines = [f"**{count.total()} items: {told}.**"]
    for document, rows in documents.items():
        lines += ["", f"## {document}", "", "|section|item|state|its tests, or why|", "|-|-|-|-|", *rows]
    return ENGINES_HEAD + "\n".join(lines) + "\n"


def main(files: list[str]) -> int:
    outcomes, failures = read_runs(Path(file) for file in files), 0
    for path, table, make in ((PAGE, TABLE, page), (ENGINES_PAGE, ENGINES, engines_page)):
        text = make(tomllib.loads(table.read_text()), outcomes)
        path.write_text(text)
        bad = re.findall(r"\d+ failed[^|]*\|$", text, re.MULTILINE)
        print(f"{path.relative_to(ROOT)}: {len(bad)} rows with failures")
        failures += len(bad)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
