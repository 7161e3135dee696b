"""The model's own tokenizer, at the edge: only jobs that come as text or messages ever load it."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ..messages.errors import RequestRefused


class Tokenizer(Protocol):
    """Text to ids and back, as the model was trained with."""

    def encode(self, text: str) -> npt.NDArray[np.int32]:
        """(n,) ids of a raw text, special tokens as the tokenizer adds them. Raises RequestRefused."""
        ...

    def encode_chat(self, messages: list[dict[str, str]]) -> npt.NDArray[np.int32]:
        """(n,) ids of a conversation in the model's chat template, up to the answer. Raises RequestRefused."""
        ...

    def decode(self, token_ids: npt.NDArray[np.int32]) -> str:
        """The text of generated ids, special tokens left out."""
        ...


class NoTokenizer:
    """For pools that are token-in, token-out: text is refused, by name."""

    def encode(self, text: str) -> npt.NDArray[np.int32]:
        raise RequestRefused("text: this worker has no tokenizer; send token_ids")

    def encode_chat(self, messages: list[dict[str, str]]) -> npt.NDArray[np.int32]:
        raise RequestRefused("messages: this worker has no tokenizer; send token_ids")

    def decode(self, token_ids: npt.NDArray[np.int32]) -> str:
        raise RequestRefused("text: this worker has no tokenizer")


class ModelTokenizer:
    """The Hugging Face tokenizer saved beside the model, loaded when first needed."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._tokenizer: Any = None

    def _load(self) -> Any:
        if self._tokenizer is None:
            from .cpu_support import prepare_transformers  # noqa: PLC0415 – only text jobs pay for transformers

            prepare_transformers()
            from transformers import AutoTokenizer  # noqa: PLC0415

            try:
                self._tokenizer = AutoTokenizer.from_pretrained(self._path)
            except (OSError, ValueError) as error:
                raise RequestRefused(f"text: no tokenizer could be loaded from {self._path}: {error}") from error
        return self._tokenizer

    def encode(self, text: str) -> npt.NDArray[np.int32]:
        ids = self._load()(text)["input_ids"]
        if not ids:
            raise RequestRefused(f"text={text[:80]!r}: the tokenizer makes no token of it")
        return np.asarray(ids, dtype=np.int32)

    def encode_chat(self, messages: list[dict[str, str]]) -> npt.NDArray[np.int32]:
        tokenizer = self._load()
        if not tokenizer.chat_template:
            raise RequestRefused(
                f"messages: the tokenizer of {self._path} has no chat template; send text or token_ids"
            )
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
        return np.asarray(ids, dtype=np.int32)

    def decode(self, token_ids: npt.NDArray[np.int32]) -> str:
        text: str = self._load().decode(token_ids.tolist(), skip_special_tokens=True)
        return text
