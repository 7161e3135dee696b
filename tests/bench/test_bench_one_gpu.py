"""`benchmarks one-gpu`, small: both ways train on a CPU, and its figures are those of TRL's log."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from benchmarks.harness import Run
from benchmarks.one_gpu import Plan, measure, told
from rolloutmq.messages.errors import ConfigError


@pytest.mark.sglang
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_both_ways_on_a_cpu() -> None:
    if find_spec("sglang") is None or find_spec("trl") is None:
        pytest.skip("SGLang or TRL is not installed")
    plan = Plan(width=64, layers=2, steps=3, prompts=2, samples=4, tokens=8)
    found = measure(plan, Run(None, quiet=True))
    rows = {row["way"]: row for row in found["rows"]}
    assert set(rows) == {"pool", "own"}
    assert rows["pool"]["importance_ratio"] == pytest.approx(1.0, abs=1e-3)
    assert rows["own"]["importance_ratio"] is None
    assert found["speedup"] == pytest.approx(rows["own"]["step_s"] / rows["pool"]["step_s"], rel=0.02, abs=0.01)
    assert min(row["reward_last"] for row in rows.values()) > 0


def test_the_hand_over_is_of_the_steps_after_the_first() -> None:
    """Its first step compiles, and finds the worker awake."""
    log = {"reward": 0.5, "completions/mean_length": 8.0, "sampling/importance_sampling_ratio/mean": 1.0}
    took = [(9.0, 9.0, 9.0), (0.1, 0.01, 0.02), (0.3, 0.03, 0.04)]
    logs = [
        log | {"rollout/sleep_s": sleep, "rollout/wake_weights_s": weights, "rollout/wake_s": wake}
        for sleep, weights, wake in took
    ]
    found = told([0.0, 10.0, 12.0, 15.0], logs)
    assert (found["first_step_s"], found["later_steps_s"], found["step_s"]) == (10.0, 5.0, 2.5)
    assert (found["to_trainer_ms"], found["to_engine_ms"]) == (200.0, 50.0)
    assert told([0.0, 1.0, 2.0], [log, log])["to_engine_ms"] is None


def test_memory_that_there_is_not() -> None:
    with pytest.raises(ConfigError, match=r"--asleep 'kv': .*unknown: \['kv'\]"):
        measure(Plan(asleep="kv"), Run(None, quiet=True))
