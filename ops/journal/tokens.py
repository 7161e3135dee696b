"""The tokens of a sample in a terminal: coloured by the version that sampled them, marked where they were unlikely."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

from ...messages.errors import MessageError
from ...messages.model import RolloutResult
from ...producer.data import Decoder
from ..terminal import printable

if TYPE_CHECKING:
    from rich.text import Text

SHOWN_TOKENS = 1500
"""Of a longer sample the first and the last ones are shown."""
SHOWN_TEXT = 80
"""Characters of one token."""
COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "bright_cyan", "bright_magenta", "bright_green")
UNLIKELY, SURPRISING = -1.0, -4.0
"""Log-probabilities below which a token is underlined, and reversed."""
LEGEND = f"a colour for each version; underlined below a log-probability of {UNLIKELY:g}, reversed below {SURPRISING:g}"

TextOf = Callable[[int], str]


def texts_of(model: str) -> TextOf:
    """The text of a token id by a model's tokenizer; "" for an id that it does not know. Raises ConfigError."""
    decoder = Decoder(model)
    decoder.decode([0])  # a tokenizer that cannot be loaded is refused here

    @cache
    def text_of(token: int) -> str:
        try:
            return decoder.decode([token], special=True)
        except MessageError:
            return ""

    return text_of


def coloured(result: RolloutResult, text_of: TextOf | None = None) -> Text:
    """A sample's tokens, as texts or ids. Where a version begins, its number stands before the first token."""
    from rich.text import Text  # noqa: PLC0415  # only who shows tokens needs it

    ids, logprobs = result.token_ids.tolist(), result.logprobs
    hidden = range(SHOWN_TOKENS // 2, len(ids) - SHOWN_TOKENS // 2) if len(ids) > SHOWN_TOKENS else range(0)
    shown, place = Text(), 0
    for number, (version, tokens) in enumerate(result.segments):
        shown.append(f"[version {version}] ", "bold")
        for at in range(place, place + tokens):
            if at in hidden:
                if at == hidden[0]:
                    shown.append(f"\n… {len(hidden):,} tokens are left out …\n", "dim")
                continue
            likely = 0.0 if logprobs is None else float(logprobs[at])
            mark = " reverse" if likely < SURPRISING else " underline" if likely < UNLIKELY else ""
            shown.append(_shown(ids[at], text_of), COLOURS[number % len(COLOURS)] + mark)
            if text_of is None:
                shown.append(" ")
        place += tokens
    return shown


def _shown(token: int, text_of: TextOf | None) -> str:
    if text_of is None:
        return str(token)
    text = text_of(token)
    cut = text if len(text) <= SHOWN_TEXT else f"{text[:SHOWN_TEXT]}…"
    return printable(cut, keep="\n") or f"<{token}>"
