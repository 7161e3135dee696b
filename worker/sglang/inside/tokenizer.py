"""The model's tokenizer in SGLang's scheduler process, for stop texts and grammars. SGLang itself runs without one."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import Any, TypeVar

from ....messages.errors import ConfigError
from ...stops import Pieces, pieces_of

logger = logging.getLogger(__name__)
T = TypeVar("T")


def background(work: Callable[[], T]) -> Future[T]:
    """Run `work` in a thread that does not hold up the process's exit."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, name="rolloutmq-tokenizer", daemon=True).start()
    return future


class EngineTokenizer:
    """A tokenizer that loads while SGLang loads the model.

    path: a folder or hub name. It is loaded as the worker loads it, so that both have the same text.
    """

    def __init__(self, path: str, *, trust_remote_code: bool = False) -> None:
        self._path, self._trust = path, trust_remote_code
        self._loading = background(self._load)

    def _load(self) -> tuple[Any, Callable[[], Pieces]]:
        from transformers import AutoTokenizer  # noqa: PLC0415 – SGLang has imported it by then

        began = time.monotonic()
        tokenizer = AutoTokenizer.from_pretrained(self._path, trust_remote_code=self._trust)
        logger.info("tokenizer loaded in %.2f s", time.monotonic() - began)
        return tokenizer, pieces_of(tokenizer)

    def get(self) -> Any:
        """The tokenizer, once it is loaded. Raises ConfigError if it cannot be."""
        return self._result()[0]

    @property
    def new_pieces(self) -> Callable[[], Pieces]:
        """See `stops.pieces_of`."""
        return self._result()[1]

    def _result(self) -> tuple[Any, Callable[[], Pieces]]:
        try:
            return self._loading.result()
        except Exception as error:
            raise ConfigError(
                f"the tokenizer of {self._path} cannot be loaded: {error}; tokenizer='off' starts the engine without"
            ) from error
