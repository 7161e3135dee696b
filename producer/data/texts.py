"""Ids to text and conversations to ids, with the trainer's own tokenizer or that of the pool's model."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from ...messages.errors import ConfigError, InvalidField


class Texts:
    """A tokenizer that is loaded when it is first needed.

    tokenizer: an object like transformers' tokenizers, a path or name of one, or None for the tokenizer of `model`.
    given: whether the caller gave one. model: the pool's model, as the workers name it.
    """

    def __init__(self, tokenizer: Any = None) -> None:
        path = tokenizer if isinstance(tokenizer, str) or hasattr(tokenizer, "__fspath__") else None
        self._path = str(path) if path is not None else None
        self._tokenizer = tokenizer if path is None else None
        self.model: str | None = None
        self._loading = threading.Lock()
        if self._tokenizer is not None and not callable(getattr(self._tokenizer, "decode", None)):
            raise InvalidField("tokenizer", tokenizer, "a path, a name, or an object with decode()")

    @property
    def given(self) -> bool:
        """See Texts."""
        return self._tokenizer is not None or self._path is not None

    def load(self) -> Any:
        """The tokenizer. Loading it blocks. Raises ConfigError if there is none.

        One thread loads it: transformers cannot be imported by two at the same time."""
        with self._loading:
            return self._load()

    def _load(self) -> Any:
        if self._tokenizer is None:
            path = self._path or self.model
            if path is None:
                raise ConfigError("tokenizer=None: give one, or start a worker, whose model's is taken")
            try:
                from transformers import AutoTokenizer  # noqa: PLC0415 – a trainer that brings its own does without

                # The workers' name of the model may mean something else on this host, so it downloads nothing.
                self._tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=self._path is None)
            except (ImportError, OSError, ValueError) as error:
                raise ConfigError(f"tokenizer: none could be loaded from {path!r}: {error}") from error
        return self._tokenizer

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of ids, without special tokens."""
        text: str = self.load().decode(list(token_ids), skip_special_tokens=True)
        return text

    def decode_many(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        """The text of each sequence. A tokenizer with `batch_decode` does it several times as fast."""
        tokenizer = self.load()
        if callable(batch := getattr(tokenizer, "batch_decode", None)):
            found: list[str] = batch([list(ids) for ids in sequences], skip_special_tokens=True)
            return found
        return [self.decode(ids) for ids in sequences]

    def encode_chat(self, conversation: Sequence[dict[str, Any]], answer: bool = True, **options: Any) -> list[int]:
        """Ids of a conversation. Raises ConfigError without a chat template.

        answer: end with the template's start of an answer. options: others of `apply_chat_template`.
        """
        tokenizer = self.load()
        options = {"add_generation_prompt": answer, "tokenize": True, **options}
        try:
            found: Any = tokenizer.apply_chat_template(list(conversation), **options)
        except (AttributeError, ValueError) as error:
            raise ConfigError(f"prompts: the tokenizer cannot render a conversation: {error}") from error
        # transformers 5 gives a mapping, 4 a list
        ids = found["input_ids"] if hasattr(found, "keys") else found
        return [int(token) for token in (ids[0] if ids and isinstance(ids[0], list) else ids)]
