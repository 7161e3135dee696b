"""What the documents point to is there."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from rolloutmq.messages import errors

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]


def _guarantees() -> str:
    return (ROOT / "docs" / "guarantees.md").read_text()


def test_every_test_that_the_guarantees_name_exists() -> None:
    named = re.findall(r"`(?:tests/[\w/]+/)?(test_\w+\.py)(?:::(test_\w+))?`", _guarantees())
    assert len(named) > 60
    for file, test in named:
        (path,) = (ROOT / "tests").rglob(file)
        assert not test or re.search(rf"^(async )?def {test}\(", path.read_text(), re.MULTILINE), f"{file}::{test}"


def test_every_promise_names_its_test() -> None:
    """Each row of the tables, and each paragraph on what somebody may rely on."""
    promised = _guarantees().partition("## What is not promised")
    tables = [
        line
        for line in "".join(promised).splitlines()
        if re.match(r"\| (?!word |level |trap |keys |what grows )", line)
    ]
    paragraphs = [text for text in promised[0].split("\n\n") if text.startswith("**")]
    assert len(tables) > 25
    assert len(paragraphs) > 10
    assert [text[:60] for text in (*tables, *paragraphs) if not re.search(r"`test_\w+\.py", text)] == []


def test_every_link_between_documents_leads_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_every_file_that_a_page_names_is_there() -> None:
    """Paths between backticks from a folder of the checkout on: modules move, pages have to follow."""
    named = {
        (page.name, path)
        for page in PAGES
        if page.name not in ("CHANGELOG.md", "capabilities.md")  # the latter is compared with its tests elsewhere
        for path in re.findall(
            r"`((?:messages|sync|producer|worker|ops|tests|tools|docs|examples|benchmarks|requirements)/[\w./-]+)`",
            page.read_text(),
        )
    }
    assert len(named) > 60
    gone = [(page, path) for page, path in named if not (ROOT / path).exists() and not (ROOT / f"{path}.py").exists()]
    assert gone == []


def test_every_error_has_its_paragraph() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    theirs = {name for name, it in vars(errors).items() if inspect.isclass(it) and it.__module__ == errors.__name__}
    assert len(theirs) > 20
    headings = re.findall(r"^### (\w+)\n\n\*\*Means\*\*: ", page, re.MULTILINE)
    assert set(headings) == theirs
    assert len(headings) == len(theirs)


def test_every_page_is_on_the_way() -> None:
    """Each page of docs/ is reached from docs/index.md, and has its place in the site."""
    index, site = (ROOT / "docs" / "index.md").read_text(), (ROOT / "mkdocs.yml").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "index.md" or f"({page.name})" in index, page.name
        assert f" {page.name}\n" in site, page.name
