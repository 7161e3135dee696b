"""Where a sample ends: stop texts, regular expressions and token sequences, looked for as tokens come.

A stop text ends the sample at the first token with which the generated text contains it, however the model put that
text into tokens. A sequence ends it at the token that completes it. Tokens of earlier legs count like those of this
one. If one token completes several stops, the one that begins first in the text wins. If they begin at the same place,
texts win over regular expressions and those over sequences, each in the order given.
"""

from __future__ import annotations

from bisect import bisect_right
from codecs import getincrementaldecoder
from collections.abc import Sequence
from dataclasses import dataclass

from ...messages.errors import RequestRefused
from ...messages.model import SamplingParams
from ..engine import MatchedStop
from .pieces import Pieces
from .regex import LAST_NEWLINE, MAX_STATES, Automaton, Step, UnsupportedRegex, automaton

TEXT, REGEX, SEQUENCE = 0, 1, 2
_Found = tuple[int, int, int]
"""Where a match begins, its kind of stop, and its number among that kind. The smallest tuple wins."""


@dataclass(frozen=True, slots=True)
class Stops:
    """What ends a sample.

    after: no stop ends the sample within this number of its tokens, over all legs (min_new_tokens).
    """

    texts: tuple[str, ...] = ()
    regexes: tuple[str, ...] = ()
    sequences: tuple[tuple[int, ...], ...] = ()
    after: int = 0

    @property
    def need_text(self) -> bool:
        """Whether a tokenizer is needed to find them."""
        return bool(self.texts or self.regexes)


@dataclass(frozen=True, slots=True)
class Match:
    """The stop that ended a sample.

    tokens: number of the sample's last tokens that have a part of the match. text: from the beginning of the match to
    the end of the last token; "" for a sequence.
    """

    stop: MatchedStop
    tokens: int
    text: str = ""


def check_stops(sampling: SamplingParams) -> None:
    """Raise RequestRefused for regular expressions that are not supported or too large."""
    size = 0
    for expression in sampling.stop_regex:
        try:
            size += automaton(expression).size
        except UnsupportedRegex as error:
            raise RequestRefused(f"sampling.stop_regex={expression!r}: {error}") from None
    if size > MAX_STATES:
        raise RequestRefused(f"sampling.stop_regex: {size} states together; allowed: {MAX_STATES}")


class StopMatcher:
    """Follows one sample token by token. A token costs the length of its new text times the number of stops.

    pieces: returns what a token adds to the text, see :mod:`.pieces`. None if no stop needs text.
    """

    def __init__(self, stops: Stops, pieces: Pieces | None = None) -> None:
        self._stops = stops
        self._texts = [text.encode() for text in stops.texts]
        self._regexes = [_RegexStop(automaton(expression)) for expression in stops.regexes]
        self._pieces = pieces if stops.need_text else None
        self._bytes = bytearray()  # the text of all tokens
        self._ends: list[int] = []  # its length after each of them
        self._longest = max(map(len, stops.sequences), default=0)
        self._recent: list[int] = []
        self._count = 0
        self._characters = _Characters()

    def follow(self, tokens: Sequence[int]) -> None:
        """Take tokens of earlier legs. They ended nothing, but a stop may have begun in them."""
        for token in tokens:
            self._take(token, wanted=False)

    def next(self, token: int) -> Match | None:
        """Take the sample's next token. Returns a match if the sample ends with it."""
        return self._take(token, wanted=self._count >= self._stops.after)

    def _take(self, token: int, *, wanted: bool) -> Match | None:
        self._count += 1
        found = [] if self._pieces is None else self._take_text(self._pieces(token))
        if self._longest:
            found += self._take_token(token)
        if not found or not wanted:
            return None
        begin, kind, rank = min(found)
        if kind == SEQUENCE:
            sequence = self._stops.sequences[rank]
            return Match(sequence, len(sequence))
        first = bisect_right(self._ends, begin)  # the token that has the match's first byte
        stop = (self._stops.regexes if kind == REGEX else self._stops.texts)[rank]
        return Match(stop, self._count - first, self._bytes[begin:].decode(errors="replace"))

    def _take_text(self, piece: bytes) -> list[_Found]:
        old = len(self._bytes)
        self._bytes += piece
        self._ends.append(len(self._bytes))
        found = []
        for rank, text in enumerate(self._texts):
            begin = self._bytes.find(text, max(0, old - len(text) + 1))
            if begin >= 0:
                found.append((begin, TEXT, rank))
        if self._regexes:
            characters = self._characters.take(piece)
            begins = [regex.take(characters) for regex in self._regexes]
            found += [(begin, REGEX, rank) for rank, begin in enumerate(begins) if begin is not None]
        return found

    def _take_token(self, token: int) -> list[_Found]:
        self._recent = [*self._recent[1 - self._longest :], token] if self._longest > 1 else [token]
        found = []
        for rank, sequence in enumerate(self._stops.sequences):
            if tuple(self._recent[-len(sequence) :]) == sequence:
                first = self._count - len(sequence)
                begin = first if self._pieces is None else self._ends[first - 1] if first else 0
                found.append((begin, SEQUENCE, rank))
        return found


class _Characters:
    """Makes characters of the text's bytes. Each byte that belongs to no character becomes U+FFFD."""

    def __init__(self) -> None:
        self._decoder = getincrementaldecoder("utf-8")("surrogateescape")
        self._place = 0

    def take(self, piece: bytes) -> list[tuple[str, int]]:
        """Return the characters that these bytes complete, each with the place of its first byte in the text."""
        found = []
        for character in self._decoder.decode(piece):
            raw = "\udc80" <= character <= "\udcff"
            found.append(("\ufffd" if raw else character, self._place))
            self._place += 1 if raw else len(character.encode())
        return found


class _RegexStop:
    """Looks for one expression in one sample. It keeps the beginnings of possible matches, and no text."""

    def __init__(self, found_by: Automaton) -> None:
        self._automaton = found_by
        self._states: tuple[int, ...] = ()
        self._begins: tuple[int, ...] = ()  # for each state, where its match begins
        self._before = ""
        self._ended = False  # whether a match ended with the text so far

    def take(self, characters: list[tuple[str, int]]) -> int | None:
        """Take more of the text, with places. Returns where the leftmost new match begins, or None."""
        if not characters:
            return None
        step, found, last = self._automaton.step, list[int](), len(characters) - 1
        for number, (character, place) in enumerate(characters):
            new = number > 0 or not self._ended
            if character == "\n" and number == last:
                self._note(found, step(self._states, self._before, LAST_NEWLINE), place, new=new)
            there = step(self._states, self._before, character)
            if there.matched is not None and new:
                found.append(self._begins[there.matched])
            if there.states or self._states:
                begins = (*self._begins, place)
                self._states, self._begins = there.states, tuple([begins[rank] for rank in there.came_from])
            self._before = character
        end = step(self._states, self._before, "").matched
        self._ended = end is not None
        if end is not None:
            found.append(self._begins[end])
        return min(found, default=None)

    def _note(self, found: list[int], there: Step, place: int, *, new: bool) -> None:
        """Note matches at a newline that ends the text: `$` holds before and after it."""
        if there.matched is not None and new:
            found.append(self._begins[there.matched])
        after = self._automaton.step(there.states, "\n", "").matched
        if after is not None:
            found.append((*self._begins, place)[there.came_from[after]])
