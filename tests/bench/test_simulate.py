"""The simulated trainer and pool against what can be worked out by hand, and against the promises of its rules."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.simulate import SHAPES, Outcome, Shape, simulate
from rolloutmq import Staleness

PLAIN = Shape(slots=64, tokens=500, tail=0.0, step_s=10.0, sync_s=0.5, batch_size=64, group=8)
"""Every batch takes 10 s to generate and 10 s to train on."""


def ran(shape: Shape, eta: int, on_stale: Any = "drop", steps: int = 60, seed: int = 0) -> Outcome:
    return simulate(shape, Staleness(eta, shape.batch_size, on_stale), steps, seed)


def test_synchronous_training_takes_both_times() -> None:
    found = ran(PLAIN, 0)
    assert found.samples_per_s == pytest.approx(64 / 20.5)
    assert found.trainer_idle == pytest.approx(10.5 / 20.5)
    assert found.pool_idle == pytest.approx(10.5 / 20.5)
    assert (found.staleness, found.max_staleness, found.dropped, found.length) == (0.0, 0, 0.0, 1.0)


@pytest.mark.parametrize(
    ("shape", "seconds"),
    [
        (replace(PLAIN, sync_s=0.0), 10.0),
        (replace(PLAIN, sync_s=0.0, step_s=30.0), 30.0),
        (replace(PLAIN, sync_s=0.0, tokens=1500), 30.0),
    ],
    ids=["balanced", "slow trainer", "slow pool"],
)
def test_one_step_of_staleness_hides_the_shorter_time(shape: Shape, seconds: float) -> None:
    assert ran(shape, 1).samples_per_s == pytest.approx(64 / seconds, rel=0.01)


@pytest.mark.parametrize("on_stale", ["wait", "drop"])
def test_synchronous_training_with_a_slow_transfer(on_stale: str) -> None:
    """Generation begins 2 s later, when the update is there: what begins with the weights before would be dropped."""
    slow = replace(PLAIN, sync_s=0.0, transfer_s=2.0)
    found = ran(slow, 0, on_stale)
    assert found.samples_per_s == pytest.approx(64 / 22.0)
    assert found.dropped == ran(slow, 1, on_stale).dropped == 0.0


def test_what_begins_during_a_transfer_is_older() -> None:
    found = ran(replace(PLAIN, sync_s=0.0, transfer_s=2.0), 1, "mark")
    assert found.samples_per_s == pytest.approx(64 / 10, rel=0.01)
    assert (found.staleness, ran(replace(PLAIN, sync_s=0.0), 1, "mark").staleness) == (2.0, 1.0)


def test_the_slots_bound_the_pool() -> None:
    """Half of the slots take twice as long."""
    found = ran(replace(PLAIN, slots=32, sync_s=0.0), 4)
    assert found.samples_per_s == pytest.approx(64 / 20, rel=0.02)
    assert found.pool_idle == pytest.approx(0.0, abs=0.01)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("on_stale", ["drop", "wait"])
def test_nothing_is_staler_than_the_bound(name: str, on_stale: str) -> None:
    for eta in (0, 1, 3):
        assert ran(SHAPES[name], eta, on_stale).max_staleness <= eta


def test_long_samples_are_starved_by_dropping_and_not_by_waiting() -> None:
    """What is dropped is what took long: those who drop train on shorter samples than the model makes."""
    heavy = SHAPES["heavy-tail"]
    assert ran(heavy, 1, "drop").length < 0.9
    assert ran(heavy, 1, "wait").length == pytest.approx(1.0, abs=0.03)
    assert ran(heavy, 1, "mark").max_staleness > 1


def test_more_staleness_never_costs_much() -> None:
    for shape in SHAPES.values():
        rates = [ran(shape, eta, "mark").samples_per_s for eta in (0, 1, 2, 4)]
        assert all(later > 0.97 * sooner for sooner, later in itertools.pairwise(rates)), rates


def test_a_seed_decides() -> None:
    heavy = SHAPES["heavy-tail"]
    assert ran(heavy, 2) == ran(heavy, 2)
    assert ran(heavy, 2) != ran(heavy, 2, seed=1)


def run(*arguments: str) -> tuple[int, str, str]:
    ended = CliRunner().invoke(app, list(arguments))
    return ended.exit_code, ended.stdout, ended.stderr


def test_the_command_prints_and_repeats() -> None:
    asked = ("staleness", "--etas", "0,2", "--training-steps", "20", "--shape", "slots=64")
    code, _, said = run(*asked)
    assert code == 0
    assert [tuple(line.split()[:3]) for line in said.splitlines()] == [
        (f"{name}:", "eta", eta) for name in SHAPES for eta in ("0", "2")
    ]
    first, again = (json.loads(run(*asked, "--scenario", "slow-pool", "--json")[1]) for _ in range(2))
    assert first["scenarios"] == again["scenarios"]
    (only,) = first["scenarios"].values()
    assert [one["eta"] for one in only["outcomes"]] == [0, 2]
    assert only["shape"]["slots"] == 64


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--scenario", "slow"), "--scenario='slow': all, or one of balanced,"),
        (("--etas", "a"), "--etas='a': bounds such as 0,1,4"),
        (("--on-stale", "keep"), "on_stale='keep'"),
        (("--shape", "slots=0"), "slots=0: a number up to 1e9"),
        (("--shape", "step=3"), "--shape='step': one of slots"),
        (("--shape", "group=7"), "group=7: a divisor of batch_size=64"),
    ],
)
def test_simulate_refuses_by_name(arguments: tuple[str, ...], says: str) -> None:
    code, _, error = run("staleness", "--training-steps", "5", *arguments)
    assert code == 2
    assert says in error
