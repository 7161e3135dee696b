"""One line for people about a result or a failure: the texts and ids in it are cut, and have no control characters."""

from __future__ import annotations

from collections.abc import Collection


def shown(it: object, *parts: str) -> str:
    """The `repr` of an object of which these parts are told; empty ones are left out."""
    return f"<{type(it).__name__} {', '.join(part for part in parts if part)}>"


def short_id(text: str) -> str:
    """An id in at most 17 characters: ids that were made one after the other differ at their ends."""
    kept = text if len(text) <= 17 else f"{text[:8]}…{text[-8:]}"
    return repr(kept)[1:-1]


def cut(text: str, most: int = 60) -> str:
    """A text in quotes, its first `most` characters; what cannot be printed is escaped."""
    return repr(text if len(text) <= most else text[:most] + "…")


def told_versions(versions: Collection[int]) -> str:
    """Weights versions as a range, "" for none; one with gaps says how many they are."""
    if len(found := {*versions}) < 2:
        return "".join(f"version {version}" for version in found)
    first, last = min(found), max(found)
    return f"versions {first}-{last}" + (f" ({len(found)} of them)" if last - first >= len(found) else "")
