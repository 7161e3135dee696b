"""What of a running sample may be shown already, and the text that belongs to it."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ...messages.model import GenerateJob
from .hold_back import hold_back
from .stream import TextStream

log = logging.getLogger(__name__)


class SampleStream:
    """What may be shown of one sample, and its text. decode: of a job that came as text; None for token ids."""

    def __init__(self, job: GenerateJob, decode: Callable[[npt.NDArray[np.int32]], str] | None) -> None:
        self._hold_back = hold_back(job.sampling)
        self._most = job.sampling.max_new_tokens - 1
        self._decode = decode
        self.restart()

    def restart(self) -> None:
        """The sample begins anew, with other tokens."""
        self._text = None if self._decode is None else TextStream(self._decode)
        self._ids: list[int] = []
        self._ends = {0: 0}  # tokens -> characters of their text, where pieces end

    def shown(self, total: int) -> int:
        """How many of `total` tokens may be shown: those that will be in the result whatever comes next.

        Not the last possible one: were only its result lost, the next worker would draw it again.
        """
        return 0 if self._hold_back is None else max(0, min(total - self._hold_back, self._most))

    def text(self, start: int, token_ids: npt.NDArray[np.int32]) -> str | None:
        """What tokens from `start` on, where another piece ended, add to the text; all before them have been here.

        None without a text, and where the tokenizer cannot decode them: the finished sample's error is what tells.
        """
        if self._text is None:
            return None
        try:
            return self._added(self._text, start, token_ids)
        except Exception as error:  # a tokenizer can raise anything, and this must not end the worker
            log.warning("what is streamed of a sample cannot be decoded: %s", error)
            self._text = None
            return None

    def _added(self, text: TextStream, start: int, token_ids: npt.NDArray[np.int32]) -> str:
        end = start + len(token_ids)
        if end < text.tokens:  # an earlier offer, which was longer, came to nothing
            assert self._decode is not None
            text = self._text = TextStream(self._decode)
            text.push(self._ids[:start])
        self._ids[start:] = token_ids.tolist()
        text.push(self._ids[text.tokens :])
        begin = self._ends.get(start, 0)
        self._ends = {0: 0, start: begin, end: len(text.text)}
        return text.text[begin:]
