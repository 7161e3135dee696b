"""The model's own tokenizer. Only jobs that come as text or messages load it."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ...messages.errors import RequestRefused


class Tokenizer(Protocol):
    """Text to ids and back, as the model was trained with."""

    def encode(self, text: str, *, special: bool = True) -> npt.NDArray[np.int32]:
        """(n,) ids of a raw text, special tokens as the tokenizer adds them, or none. Raises RequestRefused."""
        ...

    def encode_chat(
        self, messages: list[dict[str, Any]], *, tools: list[dict[str, Any]] | None = None, answer: bool = True
    ) -> npt.NDArray[np.int32]:
        """(n,) ids of a conversation in the model's chat template, up to where an answer begins, or ended.

        tools: shown to the model, if the template can. Raises RequestRefused.
        """
        ...

    def decode(self, token_ids: npt.NDArray[np.int32], *, special: bool = False) -> str:
        """The text of generated ids; special tokens left out, or only those at its very end."""
        ...


class NoTokenizer:
    """For pools that take and give token ids only: refuses text with RequestRefused."""

    def encode(self, text: str, *, special: bool = True) -> npt.NDArray[np.int32]:
        raise RequestRefused("text: this worker has no tokenizer; send token_ids")

    def encode_chat(
        self, messages: list[dict[str, Any]], *, tools: list[dict[str, Any]] | None = None, answer: bool = True
    ) -> npt.NDArray[np.int32]:
        raise RequestRefused("messages: this worker has no tokenizer; send token_ids")

    def decode(self, token_ids: npt.NDArray[np.int32], *, special: bool = False) -> str:
        raise RequestRefused("text: this worker has no tokenizer")


class ModelTokenizer:
    """The Hugging Face tokenizer saved beside the model, loaded when first needed."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._tokenizer: Any = None

    def _load(self) -> Any:
        if self._tokenizer is None:
            from ..cpu_support import prepare_transformers  # noqa: PLC0415 – only text jobs pay for transformers

            prepare_transformers()
            from transformers import AutoTokenizer  # noqa: PLC0415

            try:
                self._tokenizer = AutoTokenizer.from_pretrained(self._path)
            except (OSError, ValueError) as error:
                raise RequestRefused(f"text: no tokenizer could be loaded from {self._path}: {error}") from error
        return self._tokenizer

    def encode(self, text: str, *, special: bool = True) -> npt.NDArray[np.int32]:
        ids = self._load()(text, add_special_tokens=special)["input_ids"]
        if not ids:
            raise RequestRefused(f"text={text[:80]!r}: the tokenizer makes no token of it")
        return np.asarray(ids, dtype=np.int32)

    def encode_chat(
        self, messages: list[dict[str, Any]], *, tools: list[dict[str, Any]] | None = None, answer: bool = True
    ) -> npt.NDArray[np.int32]:
        tokenizer = self._load()
        template = tokenizer.chat_template or self._processor_template()
        if not template:
            raise RequestRefused(
                f"messages: the tokenizer of {self._path} has no chat template; send text or token_ids"
            )
        try:
            ids = tokenizer.apply_chat_template(
                messages,
                chat_template=template,
                tools=tools,
                add_generation_prompt=answer,
                tokenize=True,
                return_dict=False,
            )
        except Exception as error:  # a template is a program of the model's own, and raises what it likes
            raise RequestRefused(f"messages: the chat template of {self._path} refuses them: {error}") from error
        return np.asarray(ids, dtype=np.int32)

    def _processor_template(self) -> str | None:
        """Of models that see or hear, some keep the template beside their processor."""
        from transformers import AutoProcessor  # noqa: PLC0415

        try:
            return getattr(AutoProcessor.from_pretrained(self._path), "chat_template", None)
        except (OSError, ValueError):
            return None

    def decode(self, token_ids: npt.NDArray[np.int32], *, special: bool = False) -> str:
        tokenizer = self._load()
        ids = token_ids.tolist()
        while special and ids and ids[-1] in tokenizer.all_special_ids:
            ids.pop()
        text: str = tokenizer.decode(ids, skip_special_tokens=not special)
        return text
