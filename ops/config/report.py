"""What a configuration means, as plain data and as lines for people."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from ...messages.dialects import Fate
from .settings import Settings, hidden
from .translate import Explained

KINDS = {"skyrl": "SkyRL's generator block", "verl": "VERL's rollout block"}


def explained_state(explained: Explained) -> Any:
    """{"file", "kind", "block", "keys": [{"key", "value", "verdict", "what"}], "settings": {name: value}, "refused"}"""
    block = explained.block
    return _plain(
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
        }
    )


def explained_lines(explained: Explained) -> Iterator[str]:
    """A table of the keys, the refused ones again at its end."""
    block = explained.block
    where = "" if block is None else ".".join(block.path) or "the file itself"
    told = "settings of this package" if block is None else f"{KINDS[block.kind]}, {where}"
    yield f"{explained.file}: {told}"
    rows = [(fate.key, _short(_value(fate)), str(fate.verdict), fate.what) for fate in explained.fates]
    yield from _table([("key", "value", "", "what"), *rows])
    counts = Counter(fate.verdict for fate in explained.fates)
    yield f"{counts['became']} keys became settings, {counts['ignored']} ignored, {counts['refused']} refused"
    for fate in explained.refused:
        yield f"refused {fate.key}: {fate.what}"


def settings_state(settings: Settings) -> Any:
    """{name: {"value", "source"}} of every setting."""
    return _plain({name: {"value": value, "source": source} for name, value, source in settings.shown()})


def settings_lines(settings: Settings) -> Iterator[str]:
    """A table of every setting."""
    rows = [(name, _short(value), source) for name, value, source in settings.shown()]
    return _table([("setting", "value", "from"), *rows])


def _table(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _value(fate: Fate) -> Any:
    return hidden(fate.key, fate.value)


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(_plain(value))
    return text if len(text) <= 48 else f"{text[:45]}..."


def _plain(value: Any) -> Any:
    """What JSON has of it: a set as a sorted list, and the text of what it does not know."""
    return json.loads(
        json.dumps(value, default=lambda one: sorted(one) if isinstance(one, set | frozenset) else str(one))
    )
