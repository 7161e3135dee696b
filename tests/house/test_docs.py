"""What the documents point to is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_test_that_the_guarantees_name_exists() -> None:
    text = (ROOT / "docs" / "guarantees.md").read_text()
    named = re.findall(r"`(?:tests/\w+/)?(test_\w+\.py)(?:::(test_\w+))?`", text)
    assert len(named) > 15
    for file, test in named:
        (path,) = (ROOT / "tests").rglob(file)
        assert not test or re.search(rf"^(async )?def {test}\(", path.read_text(), re.MULTILINE), f"{file}::{test}"


def test_every_link_between_documents_leads_somewhere() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"
