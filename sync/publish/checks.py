"""Settings of a WeightPublisher that are looked at before anything is started."""

from __future__ import annotations

import math

from ...messages.errors import InvalidField

HIGHEST_PORT = 65535


def one_of(field: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raises InvalidField for anything but these."""
    if value not in allowed:
        raise InvalidField(field, value, " or ".join(repr(each) for each in allowed))


def seconds(field: str, value: object) -> None:
    """Raises InvalidField for what is no time that can be waited: an endless wait would not be a bounded one."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not (math.isfinite(value) and value > 0):  # type: ignore[operator, arg-type]
        raise InvalidField(field, value, "a finite number of seconds above 0")


def count(field: str, value: object) -> None:
    """Raises InvalidField for what is no number of things, or none of them."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidField(field, value, "an integer of at least 1")


def port(field: str, value: object) -> None:
    """Raises InvalidField for what nothing can listen on; 0 is a free one."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= HIGHEST_PORT:
        raise InvalidField(field, value, f"0 for a free one, or up to {HIGHEST_PORT}")
