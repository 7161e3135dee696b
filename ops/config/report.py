"""Prints what a configuration means, for people and for programs."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ...messages.dialects import Fate
from ..terminal import printable
from .load import Explained
from .settings import Settings, hidden

COLOURS = {"became": "green", "ignored": "dim", "refused": "red"}


def explained_json(explained: Explained) -> str:
    """{"file", "kind", "block", "keys": [{"key", "value", "verdict", "what"}], "settings": {name: value}, "refused"}"""
    block = explained.block
    return json.dumps(
        {
            "file": explained.file,
            "kind": "rolloutmq" if block is None else block.kind,
            "block": "" if block is None else ".".join(block.path),
            "keys": [
                {"key": fate.key, "value": _value(fate), "verdict": fate.verdict, "what": fate.what}
                for fate in explained.fates
            ],
            "settings": {name: hidden(name, setting.value) for name, setting in explained.settings.said.items()},
            "refused": len(explained.refused),
        },
        default=_as_json,
    )


def print_explained(explained: Explained) -> None:
    """A table of the keys, the refused ones again at its end."""
    block, console = explained.block, _console()
    if block is None:
        console.print(f"[bold]{_plain(explained.file)}[/bold]: settings of this package")
    else:
        where = ".".join(block.path) or "the file itself"
        kind = {"skyrl": "SkyRL's generator block", "verl": "VERL's rollout block"}[block.kind]
        console.print(f"[bold]{_plain(explained.file)}[/bold]: {kind}, {_plain(where)}")
    table = Table("key", "value", "", "what", box=None, pad_edge=False)
    for fate in explained.fates:
        colour = COLOURS[fate.verdict]
        table.add_row(_plain(fate.key), _short(_value(fate)), f"[{colour}]{fate.verdict}[/{colour}]", _plain(fate.what))
    console.print(table)
    counts = Counter(fate.verdict for fate in explained.fates)
    console.print(f"{counts['became']} keys became settings, {counts['ignored']} ignored, {counts['refused']} refused")
    for fate in explained.refused:
        console.print(f"[red]refused[/red] {_plain(fate.key)}: {_plain(fate.what)}")


def settings_json(settings: Settings) -> str:
    """{name: {"value", "source"}} of every setting."""
    rows = {name: {"value": value, "source": source} for name, value, source in settings.shown()}
    return json.dumps(rows, default=_as_json)


def print_settings(settings: Settings) -> None:
    """A table of every setting."""
    table = Table("setting", "value", "from", box=None, pad_edge=False)
    for name, value, source in settings.shown():
        colour = "dim" if source == "default" else "bold"
        table.add_row(_plain(name), _short(value), f"[{colour}]{_plain(source)}[/{colour}]")
    _console().print(table)


def _console() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=220)


def _value(fate: Fate) -> Any:
    return hidden(fate.key, fate.value)


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=_as_json)
    return _plain(text if len(text) <= 48 else f"{text[:45]}...")


def _as_json(value: Any) -> Any:
    return sorted(value) if isinstance(value, set | frozenset) else str(value)


def _plain(text: str) -> str:
    return escape(printable(text))
