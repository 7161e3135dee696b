"""What of a sample that is still being generated may be shown: whole characters that no stop can take back."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ...messages.model import GenerateJob, SamplingParams

log = logging.getLogger(__name__)
UNFINISHED = "\ufffd"
"""What tokenizers make of bytes that are not a character, or not yet."""
PATIENCE = 64
"""Tokens after which bytes that have not become a character are taken for what they are."""
MOST_CHARS = 1024
"""A regular expression that can match more: nothing is known of the sample before its end."""


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
        if self._tail and len(self._tail) == len(new):
            self._settle(new, len(self._window))
        elif self._tail and fresh > PATIENCE:  # many may have come at once: what is whole before the last character
            for end in range(len(self._window) - 1, len(self._window) - PATIENCE - 1, -1):
                whole = self._text(self._window[:end])[len(before) :]
                if whole and not whole.endswith(UNFINISHED):
                    break
            else:
                whole, end = new, len(self._window)
            self._settle(whole, end, new)

    def _settle(self, text: str, end: int, known: str = "") -> None:
        """Take the text of the window's tokens up to `end` for final. known: the text of all of them."""
        self._settled += text
        self._tail = known[len(text) :].rstrip(UNFINISHED)
        self._window, self._context = self._window[self._context :], end - self._context

    def _text(self, token_ids: list[int]) -> str:
        return self._decode(np.array(token_ids, dtype=np.int32)) if token_ids else ""


def hold_back(sampling: SamplingParams) -> int | None:
    """So many of the tokens generated so far may be the beginning of a stop that is not to be in the result.

    None if that may be any number of them. 0 where stops stay in the result. A token has at least one byte of text, so
    a text of n bytes has begun in n - 1 tokens at most; a stop that is complete has ended the sample.
    """
    if sampling.include_stop is True:
        return 0
    longest = 1
    for sequence in sampling.stop_token_sequences:
        longest = max(longest, len(sequence))
    for text in sampling.stop:
        longest = max(longest, len(text.encode()))
    for pattern in sampling.stop_regex:
        if (chars := _most_chars(pattern)) is None:
            return None
        longest = max(longest, 4 * chars)
    return longest - 1


def _most_chars(pattern: str) -> int | None:
    parser: Any = re._parser  # type: ignore[attr-defined]  # the only place that knows
    try:
        most = int(parser.parse(pattern).getwidth()[1])
    except (re.error, OverflowError):
        return None
    return most if most <= MOST_CHARS else None
