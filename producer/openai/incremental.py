"""The text of ids that come bit by bit: a character is shown when all of its tokens are there."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
_INCOMPLETE = "\ufffd"
WINDOW = 48
"""Tokens that are decoded again with every piece. A character, or a word's leading space, depends on no more."""


class GrowingText:
    """Of one sample. text: what was shown of it, which only grows."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._window_text = ""  # what was shown of the ids from `_window` on
        self._window = 0
        self.text = ""

    def add(self, ids: Sequence[int], *, last: bool = False) -> str:
        """The text that `ids` add. last: nothing follows, so that half characters are shown as what they are."""
        self._ids += ids
        found = self._decode(self._ids[self._window :])
        if not last:
            while found.endswith(_INCOMPLETE):
                found = found[:-1]
        if not found.startswith(self._window_text):  # a tokenizer that changes its mind: wait until it comes back to it
            return ""
        delta = found[len(self._window_text) :]
        self.text += delta
        self._window_text = found
        if len(self._ids) - self._window > 2 * WINDOW:
            self._move()
        return delta

    def _move(self) -> None:
        """Forget what nothing depends on any more, if what is decoded without it ends alike."""
        window = len(self._ids) - WINDOW
        shorter = self._decode(self._ids[window:])
        while shorter.endswith(_INCOMPLETE):
            shorter = shorter[:-1]
        if shorter and self._window_text.endswith(shorter):
            self._window, self._window_text = window, shorter
