"""Suggestions for an unknown name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches


def nearest(name: str, known: Iterable[str], count: int = 3) -> str:
    """The known names closest to `name`, as the end of a sentence: "; nearest: top_k, top_p", or "" if none is close.

    known: names, or a mapping from names to the text that is shown instead of them.
    """
    plain = {other.lower(): known[other] if isinstance(known, Mapping) else other for other in known}
    found = get_close_matches(name.lower(), plain, n=count, cutoff=0.6)
    return f"; nearest: {', '.join(plain[other] for other in found)}" if found else ""
