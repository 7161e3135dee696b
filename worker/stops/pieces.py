"""The bytes that each generated token adds to the text in which stops are looked for.

They are bytes and not characters, because a token may have only a part of a character. Special tokens are in the text
as they are written ("<|im_end|>").
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any

Pieces = Callable[[int], bytes]
"""Returns what a sample's next token adds to the text. It is called once for each token, in order."""
_CONTEXT = 8
"""Number of earlier tokens that a token's text is taken to depend on, for tokenizers of an unknown kind."""


def pieces_of(tokenizer: Any) -> Callable[[], Pieces]:
    """Return a function that makes the Pieces of one sample, for a tokenizer of transformers."""
    kinds = _decoders(tokenizer)
    if "ByteLevel" in kinds:
        return _looked_up(tokenizer, _byte_level)
    if "ByteFallback" in kinds:
        return _looked_up(tokenizer, _byte_fallback)
    return lambda: Windowed(lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False)))


def _decoders(tokenizer: Any) -> set[str]:
    """Return the names of the steps that make text of tokens. A tokenizer written in Python has none."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = getattr(backend, "decoder", None)
    if decoder is None:
        return set()
    found = json.loads(decoder.__getstate__())
    return {str(step.get("type")) for step in found.get("decoders", [found])}


def _looked_up(tokenizer: Any, bytes_of: Callable[[str], bytes]) -> Callable[[], Pieces]:
    """Pieces of tokens whose bytes do not depend on their neighbours. Each token is looked up once."""

    @cache
    def piece(token: int) -> bytes:
        name = tokenizer.convert_ids_to_tokens(token)  # None for ids that only pad the vocabulary
        return b"" if name is None else bytes_of(str(name))

    return lambda: piece


def _byte_level(name: str) -> bytes:
    """As in GPT-2 each character of a token's name stands for a byte. Added tokens are their own text."""
    try:
        return bytes(_BYTE_OF[character] for character in name)
    except KeyError:
        return name.encode()


def _byte_fallback(name: str) -> bytes:
    """As in SentencePiece "▁" is a space, "<0x41>" a byte, and everything else itself."""
    if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
        return bytes([int(name[3:5], 16)])
    return name.replace("\u2581", " ").encode()


class Windowed:
    """Pieces for any other tokenizer. A token adds what the decoded text of the last tokens grows by.

    A character that is not complete yet is held back. It counts as a part of the token that completes it.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._told = 0  # characters of the window's text

    def __call__(self, token: int) -> bytes:
        if len(self._ids) >= 2 * _CONTEXT:
            self._ids = self._ids[-_CONTEXT:]
            self._told = _complete(self._decode(self._ids))
        self._ids.append(token)
        text = self._decode(self._ids)
        new, self._told = text[self._told : _complete(text)], max(self._told, _complete(text))
        return new.encode(errors="replace")


def _complete(text: str) -> int:
    """Return the number of characters that no further token changes.

    The first bytes of an incomplete character are decoded as up to three replacement characters.
    """
    return max(len(text.rstrip("\ufffd")), len(text) - 3)


def _byte_characters() -> dict[str, int]:
    """Return GPT-2's alphabet: printable bytes are themselves, and the others follow from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(plain)]
    shifted = {chr(256 + place): byte for place, byte in enumerate(others)}
    return {chr(byte): byte for byte in plain} | shifted


_BYTE_OF = _byte_characters()
