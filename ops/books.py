"""A trainer's books, read from a file and shown: what was trained beside what was dropped."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..messages.errors import InvalidField
from ..producer.training import Books
from .files import head, read

TRAINER_STATE = "trainer_state.json"
"""Where transformers' Trainer keeps the state of its callbacks in a checkpoint; PoolRolloutWorker is one of them."""
DEEP = 6
"""The books may be so many levels deep in a checkpoint."""


def read_books(option: str, path: Path) -> Books:
    """The books in a JSON file, or in a file of `torch.save`: a feed's state, or a checkpoint with one somewhere in it.

    path: also the folder of one of TRL's checkpoints. Raises InvalidField. Nothing from the file is executed.
    """
    if path.is_dir():
        if not (path / TRAINER_STATE).is_file():
            allowed = f"a file, or a checkpoint's folder that has {TRAINER_STATE}, as TRL writes it (checkpoint-100)"
            raise InvalidField(option, str(path), allowed)
        path /= TRAINER_STATE
    for found in _mappings(_content(option, path), DEEP):
        if {"format", "accepted", "prompts", "ended"} <= found.keys():
            books = Books()
            books.load_state_dict(found)
            return books
    raise InvalidField(option, str(path), "a file with the state_dict of a feed: this one has none")


def _content(option: str, path: Path) -> Any:
    if not head(option, path, 2).startswith((b"PK", b"\x80")):  # what torch.save writes
        try:
            return json.loads(read(option, path))
        except (ValueError, RecursionError) as error:
            raise InvalidField(option, str(path), f"a file of JSON, or of torch.save: {error}") from error
    import pickle  # noqa: PLC0415 – only its error's type

    import torch  # noqa: PLC0415 – a JSON file needs none

    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError) as error:
        allowed = "a checkpoint of plain data and tensors alone, or the feed's state_dict as JSON in a file of its own"
        raise InvalidField(option, str(path), allowed) from error


def _mappings(value: Any, depth: int) -> Iterator[Mapping[str, Any]]:
    if isinstance(value, Mapping):
        yield value
    if depth and isinstance(value, Mapping | list | tuple):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _mappings(inner, depth - 1)


def books_lines(books: Books) -> list[str]:
    """The books for people: the sums, and lengths and rewards of each way in which samples ended."""
    report = books.report()
    dropped = report["dropped"]
    lines = [
        f"{report['accepted']} samples of {report['prompts']} prompts were accepted: {report['trained']} trained"
        f" + {sum(dropped.values())} dropped + {report['in_flight']} in flight",
        f"{report['updates']} updates, the newest is version {report['version']}",
    ]
    if steps := report["steps"]:
        lines.append(f"trained at steps {min(steps)} to {max(steps)}")
    if ages := report["staleness"]:
        lines.append("staleness of what was trained: " + ", ".join(f"{age}: {count}" for age, count in ages.items()))
    if marks := {name: count for name, count in report["marks"].items() if count}:
        lines.append("also: " + ", ".join(f"{name} {count}" for name, count in sorted(marks.items())))
    lines += [
        "",
        f"{'':12}{'samples':>9} {'share':>6}   {'tokens: mean':>12}{'p10':>8}{'p50':>8}{'p90':>8}{'max':>8}   ",
    ]
    lines[-1] += f"{'reward: mean':>12}{'p10':>8}{'p50':>8}{'p90':>8}"
    for name in ("trained", *dropped):
        count = report["trained"] if name == "trained" else dropped[name]
        length, reward = report["lengths"].get(name, {}), report["rewards"].get(name, {})
        share = count / max(1, report["accepted"])
        line = f"{name:12}{count:>9} {share:>6.1%}   {_number(length, 'mean', 0):>12}"
        line += "".join(f"{_number(length, it, 0):>8}" for it in ("p10", "p50", "p90", "max"))
        line += f"   {_number(reward, 'mean', 3):>12}"
        lines.append(line + "".join(f"{_number(reward, it, 3):>8}" for it in ("p10", "p50", "p90")))
    return lines


def _number(summary: Mapping[str, Any], name: str, digits: int) -> str:
    value = summary.get(name)
    return "-" if value is None else f"{value:.{digits}f}"
