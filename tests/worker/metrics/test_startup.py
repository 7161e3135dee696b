"""The phases of a worker's start."""

from __future__ import annotations

import time

import psutil
import pytest

from rolloutmq.worker.metrics import PHASES, Startup
from rolloutmq.worker.metrics.startup import process_age_s


def test_the_kernel_says_when_the_process_began() -> None:
    assert process_age_s() == pytest.approx(time.time() - psutil.Process().create_time(), abs=10.0)


def test_the_phases_add_up_to_the_time_until_it_serves() -> None:
    startup = Startup()
    startup.engine_starts()
    startup.engine_is_up({"model": 1e-4, "graphs": 0.0, "engine": 2e-4, "strange": 5.0})
    age = process_age_s()
    startup.serves()
    startup.answered(0.5)
    assert startup.seconds.keys() == set(PHASES) - {"graphs"}
    assert startup.seconds.pop("first_answer") == 0.5
    assert sum(startup.seconds.values()) > age - 0.1


def test_only_the_first_start_counts() -> None:
    startup = Startup()
    startup.engine_starts()
    startup.engine_is_up({"model": 1e-4})
    startup.serves()
    startup.answered(0.5)
    before = startup.seconds.copy()
    startup.engine_is_up({"model": 7.0})
    startup.serves()
    startup.answered(9.0)
    assert startup.seconds == before


def test_an_engine_that_counts_more_than_it_took_leaves_no_phase_below_zero() -> None:
    startup = Startup()
    startup.engine_starts()
    startup.engine_is_up({"engine": 3600.0})
    assert startup.seconds["imports"] == 0.0
