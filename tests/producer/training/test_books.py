"""The books: the three always add up, nothing is trained twice, and a checkpoint's books go on where they were."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from rolloutmq import InvalidField
from rolloutmq.ops.books import books_lines
from rolloutmq.producer.training import REASONS, Books, Measured, Spread


def played(seed: int, books: Books, told: dict[tuple[int, int], str], moves: int = 60) -> None:
    """Random moves, written down a second time in `told`."""
    draw = random.Random(seed)
    for _ in range(moves):
        move = draw.choice(["accept", "train", "drop", "advance"])
        open_ = [it for it, fate in told.items() if fate == "in flight"]
        if move == "accept":
            n = draw.randint(1, 5)
            number = books.accept(n, "job", draw.randint(0, n - 1))
            told |= {(number, sample): "in flight" for sample in range(n)}
        elif move == "advance":
            books.advance(books.version + draw.randint(1, 3))
        elif open_:
            number, sample = draw.choice(open_)
            known = {sample: Measured(draw.randint(0, 100), draw.random(), draw.randint(0, 3))}
            if move == "train":
                books.train(number, [sample], books.updates, known)
                told[number, sample] = f"trained at step {books.updates}"
            else:
                why = draw.choice(REASONS)
                books.drop(number, [sample], why, known)
                told[number, sample] = f"dropped: {why}"


def agree(books: Books, told: dict[tuple[int, int], str]) -> None:
    """The books say of each sample what was told, and their sums are the sums of what was told."""
    assert {it: books.fate(*it) for it in told} == told
    dropped = {why: sum(fate == f"dropped: {why}" for fate in told.values()) for why in REASONS}
    assert {why: books.dropped[why] for why in REASONS} == dropped
    assert books.trained == sum(fate.startswith("trained") for fate in told.values())
    assert books.in_flight == sum(fate == "in flight" for fate in told.values())
    assert books.accepted == len(told) == books.trained + sum(dropped.values()) + books.in_flight
    books.check()


@pytest.mark.parametrize("seed", range(20))
def test_books_add_up_and_survive_checkpoints(seed: int) -> None:
    """At any moment; the copy that went through JSON goes on exactly as the original does."""
    books, told = Books(), dict[tuple[int, int], str]()
    for part in range(5):
        played(seed * 100 + part, books, told)
        agree(books, told)
        again = Books()
        again.load_state_dict(json.loads(json.dumps(books.state_dict())))
        assert again.state_dict() == books.state_dict()
        assert again.report() == books.report()
        books = again


def test_a_checkpoint_is_a_copy() -> None:
    books, told = Books(), dict[tuple[int, int], str]()
    played(1, books, told)
    state = books.state_dict()
    before = json.dumps(state)
    played(2, books, told)
    assert json.dumps(state) == before


def test_nothing_ends_twice() -> None:
    books = Books()
    number = books.accept(3)
    books.train(number, [1], 7)
    for again in (lambda: books.train(number, [0, 1], 8), lambda: books.drop(number, [1], "stale")):
        with pytest.raises(
            InvalidField, match=r"sample='0\.1': a sample in flight, once; this one is trained at step 7"
        ):
            again()
    with pytest.raises(InvalidField, match=r"sample='0\.0'"):
        books.train(number, [0, 0], 8)
    assert (books.trained, books.in_flight) == (1, 2), "a call that is refused notes nothing"
    books.train(number, [0, 2], 8)
    with pytest.raises(InvalidField, match="this one is trained at step 8"):
        books.train(number, [0], 9)


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda books: books.accept(0), "n"),
        (lambda books: books.accept(2, spare=2), "n"),
        (lambda books: books.train(0, [0], -1), "step"),
        (lambda books: books.drop(0, [0], "bored"), "why"),
        (lambda books: books.train(1, [0], 0), "number"),
        (lambda books: books.train(0, [2], 0), "sample"),
        (lambda books: Books(-1), "version"),
        (lambda books: Books(2**53), "version"),
        (lambda books: books.advance(5), "version"),
        (lambda books: books.advance(2**70), "version"),
        (lambda books: books.renumber(2**70), "version"),
        (lambda books: books.train(0, [0], 2**70), "step"),
        (lambda books: books.renumber(4), "version"),
        (lambda books: books.withdraw(3), "number"),
        (lambda books: books.load_state_dict({"format": 9}), "state.format"),
        (lambda books: books.load_state_dict({"format": 1}), "state"),
        (lambda books: books.load_state_dict(books.state_dict() | {"trained": 1}), "books"),
        (lambda books: books.load_state_dict(books.state_dict() | {"prompts": []}), "prompts"),
    ],
)
def test_what_cannot_be_is_refused(call: Callable[[Books], Any], field: str) -> None:
    books = Books(version=5)
    books.accept(2)
    before = books.state_dict()
    with pytest.raises(InvalidField) as raised:
        call(books)
    assert raised.value.field == field
    assert books.state_dict() == before


def test_a_restored_trainer_is_told_which_version_is_free() -> None:
    """It was killed when version 7 was in its checkpoint, and the pool had heard of 5."""
    books = Books(version=7)
    with pytest.raises(InvalidField, match=r"version=6: .*max\(publisher\.last_version, books\.version\) \+ 1"):
        books.renumber(5 + 1)
    books.renumber(max(5, books.version) + 1)
    assert books.version == 8


def test_a_prompt_that_was_not_accepted_is_struck_out() -> None:
    books = Books()
    books.accept(2)
    books.withdraw(books.accept(3))
    assert (books.accepted, books.numbers, books.accept(1)) == (2, 1, 1)
    books.check()


def test_staleness_counts_updates_and_not_numbers() -> None:
    books = Books(version=3)
    for version in (10, 11, 40):
        books.advance(version)
    assert [books.age(oldest) for oldest in (3, 9, 10, 39, 40, 99)] == [3, 3, 2, 1, 0, 0]
    assert books.age(None) == 0
    books.renumber(50)  # a restored trainer publishes the same weights again
    assert [books.age(oldest) for oldest in (40, 45, 50)] == [0, 0, 0]
    books.advance(51)
    assert [books.age(oldest) for oldest in (40, 50, 51)] == [1, 1, 0]


def test_spare_samples_do_not_count_for_the_capacity() -> None:
    books = Books()
    number = books.accept(5, spare=2)
    assert books.live == 3
    books.drop(number, [0], "failed")
    assert books.live == 3
    books.drop(number, [1, 2], "surplus")
    assert books.live == 2
    books.train(number, [3, 4], 0)
    assert books.live == 2


def test_a_spread_is_exact_in_sum_and_close_in_quantiles() -> None:
    spread = Spread()
    for value in range(10_000):
        spread.add(float(value))
    spread.add(float("nan"))
    report = spread.report()
    assert (report["count"], report["mean"], report["min"], report["max"]) == (10_000, 4999.5, 0.0, 9999.0)
    for name, exact in (("p10", 1000), ("p50", 5000), ("p90", 9000)):
        assert report[name] == pytest.approx(exact, abs=100)
    assert Spread().report() == dict.fromkeys(("mean", "min", "p10", "p50", "p90", "max")) | {"count": 0}


def test_numbers_of_numpy_and_torch_survive_a_checkpoint() -> None:
    books = Books(np.int64(1))  # type: ignore[arg-type]
    books.advance(np.int64(2))  # type: ignore[arg-type]
    books.renumber(torch.tensor(4))  # type: ignore[arg-type]
    number = books.accept(3)
    for sample, reward in enumerate((np.float32(0.5), torch.tensor(0.5), True)):
        known = Measured(np.int32(7), reward, np.int64(1))  # type: ignore[arg-type]
        books.train(number, np.array([sample]), np.int64(3), {sample: known})  # type: ignore[arg-type]
    again = Books()
    again.load_state_dict(json.loads(json.dumps(books.state_dict())))
    assert again.report() == books.report()
    assert again.report()["rewards"]["trained"]["mean"] == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    "known", [Measured(3, "x"), Measured(3, 10**400), Measured(3, "1"), Measured(3, []), Measured("3", 1.0)]
)  # type: ignore[arg-type]
def test_nothing_is_noted_of_samples_with_a_wrong_number(known: Measured) -> None:
    books = Books()
    number = books.accept(2)
    before = books.state_dict()
    with pytest.raises(InvalidField, match=r"length=|a number or None, for sample 0\.1"):
        books.train(number, [0, 1], 0, {0: Measured(3, 1.0), 1: known})
    assert books.state_dict() == before
    books.check()


@pytest.mark.parametrize("value", ["3", 2.5, None, True])
def test_versions_and_steps_are_integers(value: Any) -> None:
    books = Books()
    books.accept(1)
    for call in (books.advance, books.renumber, lambda step: books.train(0, [0], step)):
        with pytest.raises(InvalidField, match="an integer"):
            call(value)
    assert books.in_flight == 1


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Of everything inside plain data."""
    yield at
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        yield from places(one, (*at, key))


@pytest.mark.parametrize(
    ("place", "wrong", "field"),
    [
        (["version"], -7, "version"),
        (["version"], 2.5, "version"),
        (["updates"], 2**52, "updates"),
        (["versions"], [9, 3], "versions"),
        (["versions"], [], "versions"),
        (["versions", 1], 99, "versions"),
        (["prompts", 0, 1], 4, "prompts[1].spare"),
        (["prompts", 0, 2], 3, "prompts[1].update"),
        (["marks", 0, 1], -1, "marks['waited']"),
        (["steps"], [[3, 3], [4, -2]], "steps[4]"),
        (["staleness", 0, 1], 99, "staleness"),
        (["steps", 0, 0], -1, "steps"),
        (["spreads", "trained", 0, "stride"], 0, "stride"),
        (["spreads", "trained", 0, "count"], -1, "count"),
        (["spreads", "trained", 0, "count"], 7, "kept"),
        (["spreads", "trained", 0, "ends"], [], "ends"),
        (["spreads", "boring"], [Spread().state()] * 2, "spreads"),
    ],
)
def test_a_state_with_a_number_that_cannot_be_is_refused_by_name(place: list[Any], wrong: Any, field: str) -> None:
    books = Books()
    books.accept(1)
    books.accept(4)
    books.train(0, [0], 3, {0: Measured(3, 0.5, 1)})
    books.advance(4)
    books.advance(7)
    books.marks["waited"] += 1
    state = inner = json.loads(json.dumps(books.state_dict()))
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = wrong
    with pytest.raises(InvalidField) as raised:
        Books().load_state_dict(state)
    assert raised.value.field == field


def test_a_damaged_state_is_refused_or_harmless() -> None:
    """One value of it at a time: what is loaded can be reported, advanced and saved; nothing takes long."""
    books = Books()
    books.accept(4)
    books.accept(4, "job")
    books.prompts[1].asked.append(("id", [0, 1]))
    books.train(0, [0, 1], 3, {0: Measured(3, 0.5, 1)})
    books.drop(0, [2, 3], "stale")
    books.drop(1, [0], "failed", {0: Measured(3)})
    books.advance(2)
    books.marks["waited"] += 1
    whole = json.dumps(books.state_dict())
    refused = loaded = 0
    for at in places(json.loads(whole)):
        for wrong in (None, "x", -1, -99, 0, math.inf, math.nan, [], {}, 10**30, True, [[1]], 2.5):
            state: Any = json.loads(whole)
            inner = {"": state}
            for key in ("", *at)[:-1]:
                inner = inner[key]
            inner[("", *at)[-1]] = wrong
            state = state if at else wrong
            read = Books()
            try:
                read.load_state_dict(state)
            except InvalidField:
                refused += 1
                continue
            loaded += 1
            books_lines(read)
            if read.version < 2**53 - 1:
                read.advance(2**53 - 1)
            json.dumps(read.state_dict())
    assert (refused > 500, loaded > 0) == (True, True)
