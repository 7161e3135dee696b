"""The names that a trainer gives to versions of the weights. In the pool versions are numbers."""

from __future__ import annotations

from typing import Any

from ...messages.errors import InvalidField

MAX_NAME = 128


class VersionNames:
    """The text of every version: the name that the trainer gave it ("step_100"), otherwise its number.

    Names are known in this process alone.
    """

    def __init__(self) -> None:
        self._names: dict[int, str] = {}

    def text(self, version: int) -> str:
        """The name of a version, or its number."""
        return self._names.get(version, str(version))

    def give(self, version: int, name: str) -> None:
        """From now on a version has this name. Without a name it has none any more."""
        self._names.pop(version, None)
        if name:
            self._names[version] = name

    def number(self, field: str, value: Any, new: int | None = None) -> tuple[int, str]:
        """A version's number, and its name ("" for a number). new: the number for a name that no version has.

        Raises InvalidField for another value, and for an unknown name if there is no number for it.
        """
        text = str(value)
        if isinstance(value, bool) or not isinstance(value, str | int) or not 0 < len(text) <= MAX_NAME:
            raise InvalidField(field, value, f"a whole number, or a name of 1 to {MAX_NAME} characters")
        if isinstance(value, int) or text.isdecimal():
            return int(text), ""
        version = next((number for number, name in self._names.items() if name == text), new)
        if version is None:
            raise InvalidField(field, value, "a number, or a name that was given to a version by this engine")
        return version, text
