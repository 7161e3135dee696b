"""How much of a running sample may still be taken off it again by a stop."""

from __future__ import annotations

import re
from typing import Any

from ...messages.model import SamplingParams

MOST_CHARS = 1024
"""A regular expression that can match more: nothing is known of the sample before its end."""


def hold_back(sampling: SamplingParams) -> int | None:
    """So many of the tokens generated so far may be the beginning of a stop that is not to be in the result.

    None if that may be any number of them. 0 where stops stay in the result. A token has at least one byte of text, so
    a text of n bytes has begun in n - 1 tokens at most; a stop that is complete has ended the sample.
    """
    if sampling.include_stop:
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
