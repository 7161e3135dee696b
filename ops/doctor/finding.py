"""One finding, and findings as lines for people."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from ..terminal import printable

Level = Literal["ok", "warning", "problem"]
WIDTH = 100
INDENT = 26


@dataclass(frozen=True, slots=True)
class Finding:
    """name: what was looked at. found: what is there. advice: what to do about it, in one sentence; "" for nothing.

    level: "problem" is what will lose data, fail or stand still; "warning" is what may.
    """

    name: str
    level: Level
    found: str
    advice: str = ""


def lines(findings: Iterable[Finding]) -> Iterator[str]:
    """The findings for people, and how many there are of each level."""
    counts = {"problem": 0, "warning": 0, "ok": 0}
    for finding in findings:
        counts[finding.level] += 1
        begin = f"{finding.level:9}{finding.name:{INDENT - 10}} "
        yield from _wrapped(begin, finding.found)
        if finding.advice:
            yield from _wrapped(" " * (INDENT - 3) + "-> ", finding.advice)
    yield ", ".join(f"{count} {name}{'s' * (name != 'ok' and count != 1)}" for name, count in counts.items())


def _wrapped(begin: str, text: str) -> list[str]:
    return textwrap.wrap(
        printable(text),
        WIDTH,
        initial_indent=begin,
        subsequent_indent=" " * INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )
