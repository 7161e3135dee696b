"""Staleness under 10,000 random schedules: the gate, the bounds of a job, and what becomes of stale samples."""

from __future__ import annotations

import functools
import random
from typing import Any

import numpy as np
import pytest

from rolloutmq import GenerateJob, GroupRules, InvalidField, Staleness
from rolloutmq.producer.training import Books, Measured

SCHEDULES = 10_002
"""Of all three ways together."""


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("eta", -1, "an integer, at least 0"),
        ("eta", 0.5, "an integer, at least 0"),
        ("eta", True, "an integer, at least 0"),
        ("batch_size", 0, "an integer, at least 1"),
        ("batch_size", np.float64(4), "an integer, at least 1"),
        ("on_stale", "keep", '"drop", "mark" or "wait"'),
    ],
)
def test_a_wrong_declaration_is_refused_by_name(field: str, value: Any, allowed: str) -> None:
    given: dict[str, Any] = {"eta": 1, "batch_size": 4, "on_stale": "drop", field: value}
    with pytest.raises(InvalidField) as raised:
        Staleness(**given)
    assert (raised.value.field, raised.value.value, raised.value.allowed) == (field, value, allowed)


def test_integers_of_numpy_are_integers_everywhere() -> None:
    """As in `advance`. What is kept is Python's, for a checkpoint in JSON."""
    rule = Staleness(np.int64(1), np.int32(4))  # type: ignore[arg-type]
    assert (repr(rule), rule) == (repr(Staleness(1, 4)), Staleness(1, 4))
    counts = dict.fromkeys(("over_sample", "most_filtered", "retries", "score_concurrency"), np.int64(2))
    assert repr(GroupRules(**counts)) == repr(GroupRules(**dict.fromkeys(counts, 2)))  # type: ignore[arg-type]


def test_the_rule_of_the_paper() -> None:
    """The paper's form: the N-th sample may be submitted if floor((N - 1) / B) <= step + eta."""
    for eta in range(4):
        for batch in (1, 3, 8):
            rule = Staleness(eta, batch)
            for step in range(5):
                for live in range((eta + step + 2) * batch + 2):
                    assert (rule.capacity(step, live) > 0) == (live // batch <= step + eta)


def test_a_job_gets_the_bounds_and_keeps_stricter_ones() -> None:
    plain, strict = GenerateJob(token_ids=[1]), GenerateJob(token_ids=[1], max_staleness=1, min_version=9)
    assert Staleness(3, 8).bound(plain, 7).max_staleness == 3
    assert Staleness(3, 8).bound(plain, 7).min_version == 7
    assert Staleness(3, 8, "mark").bound(plain, 7).min_version == 0
    assert Staleness(3, 8).bound(strict, 7).max_staleness == 1
    assert Staleness(3, 8, "wait").bound(plain, 7).min_version == 7
    adapted = Staleness(3, 8).bound(GenerateJob(token_ids=[1], lora="tutor"), 7)
    assert (adapted.min_version, adapted.min_adapter_version) == (0, 7)
    assert Staleness(3, 8, "wait").bound(strict, 7).min_version == 9


@pytest.mark.parametrize(
    ("left", "room", "late"),
    [
        ([], 0, False),
        ([(2, 1)], 0, True),  # the next update would make it stale
        ([(2, 1)], 1, False),  # this update may train it yet
        ([(1, 4)], 0, False),  # the next batch is all theirs
        ([(1, 5)], 0, True),  # they are more than one batch, and the batch after the next one is too late
        ([(0, 8), (1, 4)], 0, True),
        ([(0, 4), (1, 4)], 0, False),
        ([(0, 9)], 0, True),
        ([(3, 1)], 0, True),
    ],
)
def test_waiting_looks_ahead(left: list[tuple[int, int]], room: int, late: bool) -> None:
    assert Staleness(eta=2, batch_size=4, on_stale="wait").too_late(left, room) == late


@functools.cache
def bound(rule: Staleness, version: int) -> GenerateJob:
    return rule.bound(GenerateJob(token_ids=[1]), version)


class Schedule:
    """A trainer and a pool that do one random thing after the other. Everything is counted a second time here."""

    def __init__(self, seed: int, on_stale: Any) -> None:
        self.draw = random.Random(seed)
        self.rule = Staleness(self.draw.randint(0, 3), self.draw.randint(1, 3) * 2, on_stale)
        self.books = Books()
        self.born: dict[int, int] = {}  # prompt -> version of its oldest token
        self.ready: list[int] = []
        self.counted = {"accepted": 0, "trained": 0, "dropped": 0}
        self.stale_trained = 0

    def submit(self) -> None:
        counted = self.counted["accepted"] - self.counted["dropped"]
        assert self.books.live == counted
        capacity = self.rule.capacity(self.books.updates, counted)
        assert counted + capacity == (self.rule.eta + self.books.updates + 1) * self.rule.batch_size
        for _ in range(self.draw.randint(0, capacity)):
            self.books.accept(1)
            self.counted["accepted"] += 1

    def claim(self) -> None:
        """A worker starts some prompts: on its weights, which the job's bounds allow."""
        for number, prompt in self.books.prompts.items():
            if number not in self.born and self.draw.random() < 0.6:
                job = bound(self.rule, prompt.update)
                oldest = max(job.min_version, self.books.version - (job.max_staleness or 0))
                self.born[number] = self.draw.randint(oldest, self.books.version)

    def finish(self) -> None:
        """Some samples arrive, in any order; some fail."""
        ready = set(self.ready)
        for number in [it for it in self.books.prompts if it in self.born and it not in ready]:
            chance = self.draw.random()
            if chance < 0.1:
                self.books.drop(number, [0], "failed")
                self.counted["dropped"] += 1
            elif chance < 0.7:
                self.ready.append(number)

    def take(self) -> bool:
        """One step of the trainer, if there is a batch."""
        if self.rule.on_stale == "drop":
            stale = [it for it in self.ready if self.rule.is_stale(self.books.age(self.born[it]))]
            for number in stale:
                self.books.drop(number, [0], "stale", {0: Measured(5, 0.0)})
                self.ready.remove(number)
            self.counted["dropped"] += len(stale)
        updates = self.books.updates
        batch = sorted(self.ready)[: self.rule.batch_size]
        if len(batch) < self.rule.batch_size:
            return False
        left = [(updates - prompt.update, 1) for it, prompt in self.books.prompts.items() if it not in batch]
        if self.rule.on_stale == "wait" and self.rule.too_late(left):
            return False
        for number in batch:
            self.stale_trained += self.rule.is_stale(self.books.age(self.born[number]))
            self.books.train(number, [0], updates, {0: Measured(5, 1.0)})
            self.ready.remove(number)
        self.counted["trained"] += len(batch)
        self.books.advance(self.books.version + 1)
        return True

    def run(self) -> None:
        for _ in range(self.draw.randint(5, 30)):
            self.draw.choice([self.submit, self.claim, self.finish, self.take])()
            books = self.books
            assert books.accepted == books.trained + books.dropped.total() + books.in_flight
            counted = (books.accepted, books.trained, books.dropped.total())
            assert counted == tuple(self.counted.values())
        self.books.check()


@pytest.mark.parametrize("on_stale", ["drop", "mark", "wait"])
def test_random_schedules(on_stale: str) -> None:
    """In every schedule the books add up. With "drop" and "wait" nothing stale is ever trained on."""
    marked = trained = 0
    for seed in range(SCHEDULES // 3):
        schedule = Schedule(seed, on_stale)
        schedule.run()
        marked += schedule.stale_trained
        trained += schedule.counted["trained"]
    assert trained > SCHEDULES // 3
    assert (marked > 0) == (on_stale == "mark"), "only where stale samples are let through does the trainer get one"


@pytest.mark.parametrize("on_stale", ["drop", "mark", "wait"])
def test_no_schedule_comes_to_a_stand(on_stale: str) -> None:
    """Whatever was dropped before: a trainer with a pool that answers goes on. In long runs there are stragglers."""
    stale = 0
    for seed in range(20):
        schedule = Schedule(seed, on_stale)
        schedule.run()
        before = schedule.books.version
        for _ in range(200):
            schedule.submit()
            schedule.claim()
            schedule.finish()
            schedule.take()
        assert schedule.books.version > before + 10
        stale += schedule.stale_trained
    assert (stale > 0) == (on_stale == "mark")
