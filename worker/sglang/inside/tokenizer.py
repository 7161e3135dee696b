"""The model's tokenizer in SGLang's scheduler process, for stop texts and grammars; SGLang itself runs without one."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

from ....messages.errors import ConfigError
from ...stops import Pieces, pieces_of
from ..config import SGLangConfig

logger = logging.getLogger(__name__)
FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "tiktoken.model", "tekken.json")
"""A model directory with none of these has no tokenizer."""
T = TypeVar("T")


def engine_tokenizer(config: SGLangConfig) -> str:
    """Where the engine's tokenizer is, "" for none. Raises ConfigError if one is asked for and there is none."""
    if config.tokenizer == "off" or config.task != "generate":
        return ""
    path = str(config.extra.get("tokenizer_path") or config.model)
    folder = Path(path)
    # A model of the hub has one, downloaded or not.
    found = not folder.is_dir() or any((folder / name).is_file() for name in FILES)
    if not found and config.tokenizer == "on":
        raise ConfigError(f"tokenizer='on': {path} has none of {', '.join(FILES)}; allowed: 'auto' or 'off'")
    return path if found else ""


def background(work: Callable[[], T]) -> Future[T]:
    """What `work` returns or raises, from a thread that nobody waits for at exit."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, name="rolloutmq-tokenizer", daemon=True).start()
    return future


class EngineTokenizer:
    """A tokenizer that is being loaded while SGLang loads the model.

    path: as `engine_tokenizer` found it. It is loaded as the worker loads it, so that both see the same text.
    """

    def __init__(self, path: str, *, trust_remote_code: bool = False) -> None:
        self._path, self._trust = path, trust_remote_code
        self._loading = background(self._load)

    def _load(self) -> tuple[Any, Callable[[], Pieces]]:
        from transformers import AutoTokenizer  # noqa: PLC0415  (SGLang has imported it by then)

        began = time.monotonic()
        tokenizer = AutoTokenizer.from_pretrained(self._path, trust_remote_code=self._trust)
        logger.info("tokenizer loaded in %.2f s", time.monotonic() - began)
        return tokenizer, pieces_of(tokenizer)

    def get(self) -> Any:
        """The tokenizer; waits for it. Raises ConfigError if it cannot be loaded."""
        return self._result()[0]

    @property
    def new_pieces(self) -> Callable[[], Pieces]:
        """See stops_text.pieces_of."""
        return self._result()[1]

    def _result(self) -> tuple[Any, Callable[[], Pieces]]:
        try:
            return self._loading.result()
        except Exception as error:
            raise ConfigError(
                f"the tokenizer of {self._path} cannot be loaded: {error}; tokenizer='off' starts the engine without"
            ) from error
