"""A journal, and what its reader complains of."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.journals import Problems

from rolloutmq.messages.journal import Journal


@pytest.fixture
def problems() -> Problems:
    return Problems()


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with Journal(tmp_path / "journal") as made:
        yield made
