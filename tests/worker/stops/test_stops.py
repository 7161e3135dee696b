"""Where samples end: the incremental matcher against one that looks at the whole text again for every token."""

from __future__ import annotations

import re
from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from rolloutmq.messages.errors import RequestRefused
from rolloutmq.messages.model.sampling import SamplingParams
from rolloutmq.worker.stops.matcher import Match, StopMatcher, Stops, _Characters, _RegexStop, check_stops
from rolloutmq.worker.stops.pieces import Windowed
from rolloutmq.worker.stops.regex import MEMORY, Automaton, Step, UnsupportedRegex

ALPHABET = "abE\u20ac\n_ "
TEXTS = st.text(ALPHABET, min_size=1, max_size=4)


@st.composite
def tokenised(draw: st.DrawFn) -> list[bytes]:
    """A text with some bytes that are none in between, cut into tokens anywhere: within characters, too."""
    data = draw(st.lists(st.one_of(TEXTS.map(str.encode), st.sampled_from([b"\xe2", b"\x82", b"\xff"])), max_size=8))
    whole = b"".join(data)
    cuts = sorted(draw(st.sets(st.integers(0, len(whole)), max_size=len(whole))))
    tokens = [whole[i:j] for i, j in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    return [token for token in tokens if token or draw(st.booleans())]


def run(stops: Stops, tokens: list[bytes], earlier: int = 0) -> tuple[int, Match] | None:
    """After how many tokens it ends, and with what; the first `earlier` ones are of an earlier leg."""
    matcher = StopMatcher(stops, lambda token: tokens[token])
    matcher.follow(range(earlier))
    for number in range(earlier, len(tokens)):
        if match := matcher.next(number):
            return number + 1, match
    return None


def first_token(tokens: list[bytes], begin: int) -> int:
    """The token that has the byte at `begin`."""
    ends = [len(b"".join(tokens[: i + 1])) for i in range(len(tokens))]
    return next(i for i, end in enumerate(ends) if end > begin)


@given(tokenised(), st.lists(TEXTS, min_size=1, max_size=3), st.integers(0, 4), st.integers(0, 3))
def test_texts_end_it_at_the_first_token_that_completes_one(
    tokens: list[bytes], texts: list[str], after: int, earlier: int
) -> None:
    expected = None
    for count in range(after + 1, len(tokens) + 1):
        whole, old = b"".join(tokens[:count]), len(b"".join(tokens[: count - 1]))
        ends = [
            (begin, rank)
            for rank, text in enumerate(texts)
            for begin in range(len(whole))
            if whole.startswith(text.encode(), begin) and begin + len(text.encode()) > old
        ]
        if ends:
            begin, rank = min(ends)
            expected = (
                count,
                Match(texts[rank], count - first_token(tokens, begin), whole[begin:].decode(errors="replace")),
            )
            break
    earlier = min(earlier, len(tokens), (expected[0] if expected else 99) - 1)
    assert run(Stops(texts=tuple(texts), after=after), tokens, earlier) == expected


def parts() -> st.SearchStrategy[str]:
    atoms = st.sampled_from(
        ["a", "b", "E", "\u20ac", ".", "[aE]", "[^b]", r"\w", r"\s", r"\n", "(?i:e)", r"(?s:.)", "_"]
    )
    edges = st.sampled_from(["^", "$", r"\b", r"\B", r"\A", r"\Z", "(?m:^)", "(?m:$)"])
    repeat = st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{2,}"])

    def more(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        several = st.lists(inner, min_size=1, max_size=3)
        return st.one_of(
            several.map("".join),
            several.map(lambda found: f"(?:{'|'.join(found)})"),
            st.tuples(inner, repeat).map(lambda found: f"(?:{found[0]}){found[1]}"),
        )

    return st.recursive(st.one_of(atoms, atoms, edges), more, max_leaves=6)


def matches(expression: str, text: str) -> set[tuple[int, int]]:
    """Begin and end of every match that is not empty, each seen in the whole text."""
    found = set()
    for end in range(1, len(text) + 1):
        exactly = re.compile(rf"(?:{expression})(?=(?s:.{{{len(text) - end}}})\Z)")
        found |= {(begin, end) for begin in range(end) if exactly.match(text, begin)}
    return found


def seen(data: bytes) -> str:
    """As an expression sees it: without a character's first bytes at the end, one U+FFFD for each byte that is none."""
    for length in (3, 2, 1):
        try:
            data[-length:].decode()
        except UnicodeDecodeError as error:
            if len(data) >= length and error.start == 0 and error.reason == "unexpected end of data":
                data = data[:-length]
                break
    return re.sub("[\udc80-\udcff]", "\ufffd", data.decode(errors="surrogateescape"))


@given(tokenised(), parts(), st.integers(0, 3), st.integers(0, 3))
@example([b"E", b"\n", b"a"], "E$", 1, 0)
@example([b"a\n", b"b"], r"a$\nb", 0, 0)
@example([b"aE", b"b"], r"E\b", 1, 0)
def test_expressions_end_it_at_the_first_token_with_a_match(
    tokens: list[bytes], expression: str, after: int, earlier: int
) -> None:
    if re.search(expression.replace(r"\B", r"(?!\b)"), "") is not None:  # before Python 3.14 \B is not there in it
        with pytest.raises(UnsupportedRegex, match="matches the empty text"):
            Automaton(expression)
        return
    expected = None
    for count in range(after + 1, len(tokens) + 1):
        old, text = (seen(b"".join(tokens[:i])) for i in (count - 1, count))
        before = {end for _, end in matches(expression, old)}
        new = {m for m in matches(expression, text) if m[1] > len(old) or (m[1] == len(old) and m[1] not in before)}
        if len(text) > len(old) and new:
            expected = count, min(new)[0]
            break
    found = run(Stops(regexes=(expression,), after=after), tokens)
    assert (found and found[0]) == (expected and expected[0])
    if found and expected:
        count, begin = expected
        whole = b"".join(tokens[:count])
        place = len(seen(whole)[:begin].encode()) - 2 * seen(whole)[:begin].count("\ufffd")
        assert found[1] == Match(expression, count - first_token(tokens, place), whole[place:].decode(errors="replace"))
        assert run(Stops(regexes=(expression,), after=after), tokens, min(earlier, count - 1)) == found


@given(
    st.lists(st.integers(0, 2), max_size=12),
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple), min_size=1, max_size=3),
    st.integers(0, 4),
    st.integers(0, 3),
)
def test_sequences_end_it_only_as_a_whole(
    tokens: list[int], sequences: list[tuple[int, ...]], after: int, earlier: int
) -> None:
    expected = None
    for count in range(after + 1, len(tokens) + 1):
        ends = [s for s in sequences if tuple(tokens[:count][-len(s) :]) == s]
        if ends:
            longest = max(ends, key=len)  # begins first; the first of several such
            expected = count, Match(longest, len(longest))
            break
    matcher = StopMatcher(Stops(sequences=tuple(sequences), after=after))
    earlier = min(earlier, len(tokens), (expected[0] if expected else 99) - 1)
    matcher.follow(tokens[:earlier])
    found = next(((i + 1, m) for i in range(earlier, len(tokens)) if (m := matcher.next(tokens[i]))), None)
    assert found == expected


@given(tokenised())
def test_any_decoder_gives_the_same_text_in_pieces(tokens: list[bytes]) -> None:
    pieces = Windowed(lambda ids: b"".join(tokens[i] for i in ids).decode(errors="replace"))
    text = b"".join(pieces(token) for token in range(len(tokens))).decode()
    whole = b"".join(tokens).decode(errors="replace")
    assert whole.startswith(text)
    assert set(whole[len(text) :]) <= {"\ufffd"}
    assert len(whole) - len(text) <= 3


def test_of_several_the_one_that_begins_first_wins() -> None:
    tokens = [b"one ", b"tw", b"o three"]
    both = Stops(texts=("o three", "two"), regexes=("e tw?o t",), sequences=((2,),))
    assert run(both, tokens) == (3, Match("e tw?o t", 3, "e two three"))
    assert run(Stops(texts=("two", "tw", "two t")), tokens) == (2, Match("tw", 1, "tw"))
    assert run(Stops(texts=("two t", "two")), tokens) == (3, Match("two t", 2, "two three"))
    assert run(Stops(texts=("o thr",), sequences=((1, 2), (2,))), tokens) == (3, Match((1, 2), 2))


@pytest.mark.parametrize("expression", ["(a+)+$", "(a|a)*b", "(?:a|ab?)*c", ".*.*.*.*x", "(?:a{1,9}){1,30}b"])
def test_no_expression_takes_for_ever(expression: str) -> None:
    matcher = StopMatcher(Stops(regexes=(expression,), after=10_000), lambda _: b"aaaaaaaa")
    for token in range(2_000):
        matcher.next(token)


def test_a_match_that_began_long_ago_is_found_in_one_step() -> None:
    """And so with as little work as any other: the scheduler's process waits for it."""
    steps: list[str] = []

    class Counting(Automaton):
        def step(self, states: tuple[int, ...], before: str, following: str) -> Step:
            steps.append(following)
            return super().step(states, before, following)

    stop, characters = _RegexStop(Counting("(?s)<a>.*</a>")), _Characters()
    for _ in range(3):
        assert stop.take(characters.take(b"x<")) is None
    assert stop.take(characters.take("<a>\u20ac".encode())) is None
    for _ in range(5_000):
        assert stop.take(characters.take(b"text")) is None
    steps.clear()
    assert stop.take(characters.take(b"</a>")) == 6
    assert len(steps) == len("</a>") + 1


def test_what_an_expression_remembers_is_bounded() -> None:
    """Random text for an expression of which nearly every step is new."""
    found_by, random = Automaton("a[ab]{400}c"), Random(0)
    stop, characters = _RegexStop(found_by), _Characters()
    for _ in range(500):
        assert stop.take(characters.take(bytes(random.choices(b"ab", k=4)))) is None
        kept = sum(len(key[0]) + len(step.states) for key, step in found_by._memory.items())
        assert kept <= MEMORY


@pytest.mark.timeout(20)
@pytest.mark.parametrize("expression", [r"(?:(?:a?|b?){5}){30}\b", r"(?:a?|b?|c?){40}(?:d|\b)"])
def test_no_expression_takes_for_ever_to_be_refused(expression: str) -> None:
    """Python's own matcher does, already in an empty text."""
    with pytest.raises(ValidationError, match="matches the empty text"):
        SamplingParams(stop_regex=(expression,))
    Automaton(expression)  # which looks closer: it matches the empty text at the edge of a word only


@pytest.mark.parametrize(
    ("expression", "why"),
    [
        ("(", "not a regular expression"),
        ("a*", "matches the empty text"),
        (r"(a)\1", "a reference to a group"),
        ("a(?=b)", "looking ahead"),
        ("(?<!b)a", "looking ahead or behind"),
        ("(?>a+)b", "atomic group"),
        ("a{1,2000}b", "more than 1000 states"),
    ],
)
def test_what_cannot_be_looked_for_is_refused(expression: str, why: str) -> None:
    with pytest.raises(RequestRefused, match=f"sampling.stop_regex=.*{why}"):
        check_stops(SamplingParams.model_construct(stop_regex=(expression,)))


def test_all_of_a_job_together_are_not_too_large() -> None:
    check_stops(SamplingParams(stop_regex=("a{300}b", "a{300}c")))
    with pytest.raises(RequestRefused, match=r"sampling\.stop_regex: 1202 states together; allowed: 1000"):
        check_stops(SamplingParams(stop_regex=("a{599}b", "a{599}c")))
