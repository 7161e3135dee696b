"""Lines of a screen: parts that fit, tables whose columns fit, figures in few letters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from ..terminal import printable

GAP = 2
CUT = "…"


class Column(NamedTuple):
    """A column of a table. rank: 0 is always shown, the others in this order as far as there is room.

    width: in cells. most: what it may grow to where there is room. right: figures stand at the right.
    """

    title: str
    width: int
    rank: int = 0
    right: bool = False
    most: int = 0


Cell = tuple[str, str]
"""Text and its style, "" for none."""


def cells(text: str, width: int, *, right: bool = False) -> str:
    """`text` in exactly `width` cells."""
    text = printable(text)
    if cell_len(text) > width:
        text = set_cell_size(text, max(0, width - 1)) + CUT if width > 0 else ""
    room = max(0, width - cell_len(text))
    return " " * room + text if right else text + " " * room


def fitting(columns: Sequence[Column], width: int) -> list[tuple[int, int]]:
    """(number, width) of the columns that fit into `width`, in their order."""
    widths: dict[int, int] = {}
    room = width
    ranked = sorted(range(len(columns)), key=lambda it: columns[it].rank)
    for number in ranked:
        wanted = columns[number].width + (GAP if widths else 0)
        if widths and wanted > room:
            break
        widths[number] = min(columns[number].width, width)
        room -= wanted
    for number, least in widths.items():
        widths[number] = max(least, min(least + room, columns[number].most))
        room -= widths[number] - least
    return sorted(widths.items())


def row(columns: Sequence[Column], fit: Sequence[tuple[int, int]], values: Sequence[Cell], style: str = "") -> Text:
    """One line of a table."""
    line = Text(style=style, no_wrap=True)
    for number, width in fit:
        text, own = values[number]
        line.append(" " * GAP if line else "").append(cells(text, width, right=columns[number].right), own or None)
    return line


def facts(width: int, *parts: Cell) -> Text:
    """Parts behind each other, the first ones as far as they fit."""
    line, used = Text(no_wrap=True), 0
    for text, style in parts:
        if not text:
            continue
        shown = printable(text)
        gap = 3 if used else 0
        if used and used + gap + cell_len(shown) > width:
            break
        shown = cells(shown, width) if cell_len(shown) > width else shown
        line.append(" " * gap).append(shown, style or None)
        used += gap + cell_len(shown)
    return line


def short(number: float) -> str:
    """A count in at most six letters."""
    for unit in ("", "k", "M", "G"):
        if abs(number) < 10_000:
            return f"{number:,.1f}{unit}" if unit and number < 100 else f"{number:,.0f}{unit}"
        number /= 1000
    return f"{number:,.0f}T"


def nbytes(number: int) -> str:
    """Bytes for people."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number} B"


def lasting(seconds: float | None) -> str:
    """A duration for people; a dash if it is not known."""
    if seconds is None:
        return "–"
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h" if seconds < 100 * 3600 else f"{seconds / 86400:.0f} d"
