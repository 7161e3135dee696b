"""Searches text that grows for regular expressions: one step for each character, whatever the expression.

Python's own matcher would have to read the whole text again for every token, and for some expressions it takes for
ever. Here an expression is a nondeterministic automaton. It runs as a deterministic one whose states are made when they
are needed. Syntax and meaning are those of Python's `re`. What an automaton cannot do (references to groups, looking
ahead and behind, atomic and possessive parts) is refused when it is compiled.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from re import _compiler, _parser  # type: ignore[attr-defined]
from typing import Any, NamedTuple

MAX_STATES = 1000
MEMORY = 500_000
"""Most numbers, of 8 bytes each, in the steps that one expression remembers. Then it forgets all of them."""
_ENTRY = 64
"""Size of a step beside its states, in such numbers."""
_ACCEPT = 0
LAST_NEWLINE = "\n$"
"""Stands for the next character if it is a newline that ends the text. `$` holds before it."""
_KINDS = re.ASCII | re.UNICODE | re.LOCALE
Predicate = Callable[[str], bool]
Condition = Callable[[str, str], bool]  # of the characters before and after a place, "" for none


class UnsupportedRegex(ValueError):
    """This expression is not supported. The text says why."""


class _State(NamedTuple):
    """A state that consumes a character which `takes` accepts, or is passed without one if `condition` holds."""

    takes: Predicate | None
    condition: Condition | None
    follow: tuple[int, ...]


class Step(NamedTuple):
    """The result of one character.

    matched: place, among the states before, of the one with the leftmost match that ends before the character.
    states: after the character. came_from: for each of them the place of the state before whose match it continues. A
        match that begins here has the number of the states before.
    """

    matched: int | None
    states: tuple[int, ...]
    came_from: tuple[int, ...]


class Automaton:
    """One compiled expression. All samples that look for it share it. Raises UnsupportedRegex."""

    def __init__(self, expression: str) -> None:
        try:
            re.compile(expression)
            parsed = _parser.parse(expression)
        except (re.error, RecursionError, OverflowError) as error:
            raise UnsupportedRegex(f"not a regular expression: {error}") from None
        self._states: list[_State] = [_State(None, None, ())]  # the first is acceptance
        self._predicates: dict[tuple[str, int], Predicate] = {}
        self._start = self._build(list(parsed), parsed.state.flags, _ACCEPT)
        self._memory: dict[tuple[tuple[int, ...], str, str], Step] = {}
        self._remembered = 0
        # Python's matcher is not used for it, because for some expressions it takes for ever.
        if _ACCEPT in self._closure(self._start, "", "", set()):
            raise UnsupportedRegex("it matches the empty text")

    @property
    def size(self) -> int:
        """Number of its states."""
        return len(self._states)

    # --- from the expression ---------------------------------------------------------------------------------------

    def _add(self, takes: Predicate | None, condition: Condition | None, *follow: int) -> int:
        if len(self._states) >= MAX_STATES:
            raise UnsupportedRegex(f"more than {MAX_STATES} states: repeat less of it, or less often")
        self._states.append(_State(takes, condition, follow))
        return len(self._states) - 1

    def _build(self, items: list[Any], flags: int, after: int) -> int:
        """Make the state from which `items` lead to `after`."""
        for item in reversed(items):
            after = self._one(item, flags, after)
        return after

    def _one(self, item: Any, flags: int, after: int) -> int:
        kind, value = item
        name = str(kind)
        if name in ("LITERAL", "NOT_LITERAL", "ANY", "IN"):
            key = repr(item), flags
            if key not in self._predicates:
                self._predicates[key] = _predicate(item, flags)
            return self._add(self._predicates[key], None, after)
        if name == "AT":
            return self._add(None, _condition(str(value), flags), after)
        if name == "BRANCH":
            return self._add(None, None, *(self._build(list(branch), flags, after) for branch in value[1]))
        if name == "SUBPATTERN":
            _, more, fewer, body = value
            kept = flags & ~_KINDS if more & _KINDS else flags
            return self._build(list(body), (kept | more) & ~fewer, after)
        if name in ("MAX_REPEAT", "MIN_REPEAT"):
            least, most, body = value
            return self._repeat(least, most, list(body), flags, after)
        said = {"GROUPREF": "a reference to a group", "GROUPREF_EXISTS": "a reference to a group"}
        said |= {"ASSERT": "looking ahead or behind", "ASSERT_NOT": "looking ahead or behind"}
        raise UnsupportedRegex(f"{said.get(name, name.lower().replace('_', ' '))} is not supported")

    def _repeat(self, least: int, most: Any, items: list[Any], flags: int, after: int) -> int:
        if most == _parser.MAXREPEAT:
            loop = self._add(None, None)  # where it leads is set when the body is there
            self._states[loop] = _State(None, None, (self._build(items, flags, loop), after))
            after = loop
        else:
            done = after
            for _ in range(most - least):
                after = self._add(None, None, self._build(items, flags, after), done)
        for _ in range(least):
            after = self._build(items, flags, after)
        return after

    # --- over the text ---------------------------------------------------------------------------------------------

    def _closure(self, state: int, before: str, following: str, reached: set[int]) -> list[int]:
        """Return states that `state` leads to without a character, between these two, and that are not in `reached`."""
        found: list[int] = []
        waiting = [state]
        while waiting:
            number = waiting.pop()
            if number in reached:
                continue
            reached.add(number)
            found.append(number)
            one = self._states[number]
            if one.takes is None and (one.condition is None or one.condition(before, following)):
                waiting.extend(one.follow)
        return found

    def step(self, states: tuple[int, ...], before: str, following: str) -> Step:
        """Go from one place in the text, between two characters, to the next.

        states: the possible ones here. Those of matches that begin further left come first. before, following: a
        character each, or "" at the beginning and at the end. `following` may be LAST_NEWLINE.
        """
        key = states, before, following
        if (known := self._memory.get(key)) is None:
            known = self._step(*key)
            self._remembered += len(states) + len(known.states) + _ENTRY
            if self._remembered > MEMORY:
                self._memory.clear()
                self._remembered = len(states) + len(known.states) + _ENTRY
            self._memory[key] = known
        return known

    def _step(self, states: tuple[int, ...], before: str, following: str) -> Step:
        reached: set[int] = set()
        leads: dict[int, int] = {}
        matched = None
        # A state that several lead to belongs to the leftmost one. A match that begins here comes last. None is empty.
        for rank, state in enumerate((*states, self._start)):
            for number in self._closure(state, before, following, reached):
                if number == _ACCEPT and rank < len(states):
                    matched = rank
                takes = self._states[number].takes
                if following and takes is not None and takes(following[0]):
                    for follow in self._states[number].follow:
                        leads.setdefault(follow, rank)
        return Step(matched, tuple(leads), tuple(leads.values()))


@lru_cache(maxsize=64)
def automaton(expression: str) -> Automaton:
    """Return the compiled expression. It is compiled once. Raises UnsupportedRegex."""
    return Automaton(expression)


def _predicate(item: Any, flags: int) -> Predicate:
    """Return what Python's matcher says about one character. It is asked once for each."""
    state = _parser.State()
    state.flags = flags
    pattern = _compiler.compile(_parser.SubPattern(state, [item]), flags)
    return lru_cache(maxsize=4096)(lambda character: pattern.fullmatch(character) is not None)


def _condition(name: str, flags: int) -> Condition:
    ascii_only = bool(flags & re.ASCII)
    if name in ("AT_BEGINNING", "AT_BEGINNING_STRING"):
        every = name == "AT_BEGINNING" and bool(flags & re.MULTILINE)
        return lambda before, _: not before or (every and before == "\n")
    if name == "AT_END_STRING":
        return lambda _, following: not following
    if name == "AT_END":
        lines = bool(flags & re.MULTILINE)
        return lambda _, following: following in ("", LAST_NEWLINE) or (lines and following == "\n")
    wanted = name == "AT_BOUNDARY"
    return lambda before, following: (_word(before, ascii_only) != _word(following, ascii_only)) is wanted


def _word(character: str, ascii_only: bool) -> bool:
    return (character.isalnum() or character == "_") and (not ascii_only or character.isascii())
