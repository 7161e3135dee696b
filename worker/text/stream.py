"""The text of a sample that is still being generated: every character once it is whole, and none of it twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

UNFINISHED = "\ufffd"
"""What tokenizers make of bytes that are not a character, or not yet."""
PATIENCE = 64
"""Tokens after which bytes that have not become a character are taken for what they are."""


class TextStream:
    """Decodes token by token what `decode` makes of all tokens at once.

    Nothing is decoded from the start again: as much is decoded with each new token as has come since the text was last
    whole, behind the tokens before that, whose text it may depend on. So a tokenizer whose text of n tokens does not
    begin with its text of fewer, apart from unfinished characters, does not come out right.
    """

    def __init__(self, decode: Callable[[npt.NDArray[np.int32]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []  # context, then what is not settled
        self._context = 0  # tokens of the first kind
        self._settled = ""
        self._tail = ""  # of what is not settled, the whole characters
        self.tokens = 0

    @property
    def text(self) -> str:
        """All whole characters so far."""
        return self._settled + self._tail

    def push(self, token_ids: Sequence[int]) -> None:
        """The next tokens."""
        if not len(token_ids):
            return
        self._window += token_ids
        self.tokens += len(token_ids)
        before = self._text(self._window[: self._context])
        new = self._text(self._window)[len(before) :]
        self._tail = new.rstrip(UNFINISHED)
        fresh = len(self._window) - self._context
        if self._tail and (len(self._tail) == len(new) or fresh > PATIENCE):
            self._settled, self._tail = self._settled + new, ""
            self._window = self._window[self._context :]
            self._context = len(self._window)

    def _text(self, token_ids: list[int]) -> str:
        return self._decode(np.array(token_ids, dtype=np.int32)) if token_ids else ""
