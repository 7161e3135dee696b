"""Just enough of Redis' protocol to know which commands a client sends, whatever pieces they arrive in."""

from __future__ import annotations

from collections.abc import Iterator

WORDS = 3
WORD_BYTES = 64
"""Of each command the first words are kept, and of those the first bytes: payloads only pass by."""


class Requests:
    """Feed it bytes on their way to the server; it yields the first words of every command that is complete."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._left = 0  # arguments of the command under way
        self._skip = 0  # bytes of an argument, and its line end, still to come
        self._words: list[bytes] = []

    def feed(self, data: bytes) -> Iterator[list[bytes]]:
        self._buffer += data
        while self._step():
            if self._left == 0 and self._skip == 0 and self._words:
                yield self._words
                self._words = []

    def _step(self) -> bool:
        """Take one piece from the buffer; False if it is not whole yet."""
        if self._skip:
            taken = min(self._skip, len(self._buffer))
            del self._buffer[:taken]
            self._skip -= taken
            return self._skip == 0
        end = self._buffer.find(b"\r\n")
        if end < 0:
            return False
        kind, size = self._buffer[0], int(self._buffer[1:end])
        if kind == ord("*"):
            del self._buffer[: end + 2]
            self._left = size
            return True
        keep = min(size, WORD_BYTES)
        if len(self._words) < WORDS and len(self._buffer) < end + 2 + keep:
            return False
        if len(self._words) < WORDS:
            self._words.append(bytes(self._buffer[end + 2 : end + 2 + keep]))
        del self._buffer[: end + 2]
        self._left -= 1
        self._skip = size + 2
        return True
