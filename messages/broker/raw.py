"""What Redis answers, as text and numbers. Anybody may have written it, so nothing of it raises."""

from __future__ import annotations


def text(raw: bytes | None) -> str:
    """ "" for nothing. Bytes that are not UTF-8 become replacement characters."""
    return "" if raw is None else raw.decode(errors="replace")


def whole(raw: bytes | None) -> int:
    """0 for what is no whole number of at most 15 digits, as in lib.lua."""
    digits = text(raw)
    sign, digits = (-1, digits[1:]) if digits.startswith("-") else (1, digits)
    return sign * int(digits) if digits.isascii() and digits.isdigit() and len(digits) <= 15 else 0
