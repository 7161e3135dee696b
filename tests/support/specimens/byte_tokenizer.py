"""A tokenizer for tests without a model: a token is a byte, and turns of a chat stand between marks."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

START, END = 256, 257


class Bytes:
    """Implements `Tokenizer`; ids from 256 on are special, and what is above 257 has no text."""

    def encode(self, text: str, *, special: bool = True) -> npt.NDArray[np.int32]:
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def encode_chat(
        self, messages: list[dict[str, Any]], *, tools: list[dict[str, Any]] | None = None, answer: bool = True
    ) -> npt.NDArray[np.int32]:
        ids: list[int] = []
        for message in messages:
            ids += [START, *f"{message['role']}\n{message['content']}".encode(), END, 10]
        return np.array(ids + ([START, *b"assistant\n"] if answer else []), np.int32)

    def decode(self, token_ids: npt.NDArray[np.int32], *, special: bool = False) -> str:
        return bytes(int(token) for token in token_ids if token < 256).decode(errors="replace")
