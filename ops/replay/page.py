"""The report as one HTML page: it needs no network and no other file, and trusts no text that is in it."""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from ...messages.errors import ConfigError
from .report import INFINITE

HERE = Path(__file__).parent
ENGINES = 4
"""Of each side, the most engines whose fingerprints stand side by side."""


def as_html(report: Mapping[str, Any]) -> str:
    """The HTML of a report, as `report_of` makes it. Raises ConfigError if jinja2 is not installed."""
    try:
        from jinja2 import Environment, StrictUndefined  # noqa: PLC0415  # only the page needs it
    except ModuleNotFoundError:
        raise ConfigError("a report as HTML needs jinja2: pip install 'rolloutmq[replay]'") from None
    style, script = ((HERE / f"page.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {
        "figure": figure,
        "count": "{:,}".format,
        "clock": _clock,
        "anchor": anchor,
        "digits": digits,
    }
    shown = _visible(report)
    data = {"texts": shown["texts"], "limit": shown["limits"]["logprob"], "infinite": INFINITE}
    return environment.from_string((HERE / "page.html").read_text(encoding="utf-8")).render(
        it=shown,
        headline=headline(report),
        engines=_engines(shown["engines"]),
        details=sum("detail" in row for row in shown["listed"]),
        note_names=_note_names(shown["listed"]),
        histogram=_histogram(shown["histogram"], shown["limits"]["logprob"]),
        data=data | {"details": [row.get("detail") for row in shown["listed"]]},
        style=style,
        script=script,
        policy=f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; base-uri 'none'; "
        "form-action 'none'",
    )


def headline(report: Mapping[str, Any]) -> str:
    """The verdict in one line."""
    states, samples = report["states"], report["samples"]
    if not samples:
        return "No sample was replayed"
    if states["same"] == samples:
        return f"All {samples:,} samples are the same" if samples > 1 else "The sample is the same"
    told = [f"{states['differs']:,} of {samples:,} samples differ"] if states["differs"] else []
    if states["unverified"]:
        told.append(f"{states['unverified']:,}{'' if told else f' of {samples:,} samples'} could not be verified")
    return ", ".join(told)


def visible(text: str) -> str:
    """The text, where each character that cannot be seen, or changes how others look, is shown by its number.

    Such are control characters, marks of direction, surrogates, and what Unicode does not assign.
    """
    return "".join(one if one.isprintable() or one in "\n\t" else f"⟨U+{ord(one):04X}⟩" for one in text)


def anchor(name: str) -> str:
    """The part of the page's address behind `#` for a sample: page.html#0192….3."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", name)


def figure(value: float | None) -> str:
    """A difference or a log-probability, in four digits."""
    if value is None:
        return "–"
    return f"{value:.4g}" if abs(value) < INFINITE else "∞" if value > 0 else "-∞"


def digits(number: float) -> float:
    """The length of a bar on a logarithmic scale."""
    return round(math.log10(1 + number), 2)


def _visible(value: Any) -> Any:
    """Plain data with every text made visible."""
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, Mapping):
        return {_visible(name): _visible(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_visible(inner) for inner in value]
    return value


def _clock(at: float) -> str:
    try:
        return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        return "at an unknown time"


def _digest(text: str) -> str:
    """What a content security policy names an inline style or script by."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _engines(engines: Mapping[str, Any]) -> dict[str, Any]:
    """A table: a column for each engine that recorded or replayed, and a row for each part of their fingerprints."""
    sides = [(side, one) for side in ("recorded", "replayed") for one in engines[side][:ENGINES]]
    columns = [one["fingerprint"] for _, one in sides]
    rows = []
    for name in dict.fromkeys(name for column in columns for name in column):
        values = [column.get(name) for column in columns]
        rows.append({"name": name, "values": values, "differs": len({str(value) for value in values}) > 1})
    left_out = sum(max(0, len(engines[side]) - ENGINES) for side in engines)
    return {"heads": [f"{side}, {one['samples']:,} samples" for side, one in sides], "rows": rows, "left_out": left_out}


def _note_names(listed: Sequence[Mapping[str, Any]]) -> list[str]:
    """Notes that have a column of their own in the list: numbers, the ones that most samples have."""
    found = Counter(name for row in listed for name, value in row["notes"].items() if isinstance(value, int | float))
    return [name for name, _ in found.most_common(4)]


def _histogram(found: Mapping[str, Any], limit: float) -> list[tuple[str, int, bool]]:
    """Rows: a size of the difference, the number of tokens, and whether that is beyond the limit."""
    edges = found["edges"]
    names = [f"below {edges[0]:.0e}", *(f"{a:.2g} to {b:.2g}" for a, b in pairwise(edges)), f"{edges[-1]:.2g} or more"]
    sizes = zip(names, found["tokens"], [0.0, *edges], strict=True)
    rows = [(name, tokens, least >= limit) for name, tokens, least in sizes]
    return [("exactly equal", found["exactly_equal"], False), *rows, ("unknown", found["unknown"], False)]
