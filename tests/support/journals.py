"""What tests of journals share: the files of one, and what its reader complained of."""

from __future__ import annotations

from pathlib import Path

from rolloutmq.messages.journal import SUFFIX


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*{SUFFIX}"))


class Problems(list[str]):
    """As `on_problem`."""

    __call__ = list.append
