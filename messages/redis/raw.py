"""What Redis answers, as text and numbers. Anybody may have written it, so nothing here raises."""

from __future__ import annotations

import logging
from functools import lru_cache

log = logging.getLogger(__name__)


def text(raw: bytes | None) -> str:
    """ "" for nothing. Bytes that are not UTF-8 become replacement characters."""
    return "" if raw is None else raw.decode(errors="replace")


def whole(raw: bytes | None, where: str = "") -> int:
    """0 for nothing, and for what is no whole number of at most 15 digits, as in lib_base.lua.

    where: for the log, which names each thing that is no number once.
    """
    if raw is None:
        return 0
    digits = text(raw)
    sign, digits = (-1, digits[1:]) if digits.startswith("-") else (1, digits)
    if digits.isascii() and digits.isdigit() and len(digits) <= 15:
        return sign * int(digits)
    if where:
        name_once(f"{where} is {text(raw)[:80]!r}, not a number: it counts as 0")
    return 0


def is_wrong_type(error: BaseException) -> bool:
    """Whether a command was refused because its key holds something of another type."""
    return "WRONGTYPE" in str(error)


@lru_cache(maxsize=1024)
def name_once(what: str) -> None:
    """Warn of something in Redis that cannot be used. The same text is logged once."""
    log.warning("found in Redis: %s", what)
