"""Suggestions for an unknown name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from inspect import signature


def nearest(name: str, known: Iterable[str], count: int = 3) -> str:
    """The known names closest to `name`, as the end of a sentence: "; nearest: top_k, top_p", or "" if none is close.

    known: names, or a mapping from names to the text that is shown instead of them.
    """
    plain = {other.lower(): known[other] if isinstance(known, Mapping) else other for other in known}
    found = get_close_matches(name.lower(), plain, n=count, cutoff=0.6)
    return f"; nearest: {', '.join(plain[other] for other in found)}" if found else ""


def instead_of(name: str, value: object, unknown: str, known: Iterable[str], parts: Mapping[str, type]) -> str:
    """What to write instead of an unknown name: where it belongs, or which names are nearest.

    unknown: that there is no such name, as a sentence. known: the names that there are. parts: those of them whose
    value is of a class that takes names of its own.
    """
    places: dict[str, str] = {}
    for argument, kind in parts.items():
        names = signature(kind).parameters
        if name in names:
            shown = text if len(text := repr(value)) <= 40 else "..."
            return f"a field of {kind.__name__}: {argument}={kind.__name__}({name}={shown})"
        places = {other: f"{argument}={kind.__name__}({other}=...)" for other in names} | places
    return unknown + nearest(name, places | {other: other for other in known})
