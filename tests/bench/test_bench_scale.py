"""`benchmarks scale` at a small size: the real broker under a fleet that comes and goes, and what is counted."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from benchmarks import harness
from benchmarks.parts import BenchFailed
from benchmarks.scale.bench import Plan, simulate
from benchmarks.scale.deaths import Deaths
from benchmarks.scale.draws import Draws
from benchmarks.scale.oracle import Oracle, script
from benchmarks.scale.scenario import Scenario, read_scenario
from benchmarks.scale.timeline import Timeline
from rolloutmq.messages.broker import Finished, Lease
from rolloutmq.messages.errors import ConfigError, InvalidField
from rolloutmq.messages.model import JobFailure, RolloutResult, Segment

PREEMPTED = Path(__file__).resolve().parents[2] / "benchmarks" / "scenarios" / "preempted.toml"


def test_half_the_fleet_preempted_every_minute_loses_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    figures = harness.run(Plan(PREEMPTED, workers=24), quiet=True)
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == json.loads(json.dumps(figures))
    kept, without = figures["with_partials"], figures["without_partials"]
    for run in (kept, without):
        assert run["samples"] == 4 * run["jobs"] > 0
        assert (run["lost_jobs"], run["failed_jobs"], run["results_twice"], run["results_wrong"]) == (0, 0, 0, 0)
        assert run["workers"]["pre-empted with notice"] > 0
        assert run["workers"]["died"] > 0
        assert run["gpu_hours"]["used"] > 0
    assert kept["jobs"] == without["jobs"]
    assert kept["tokens"]["delivered"] == without["tokens"]["delivered"]  # the same load
    assert kept["tokens"]["wasted_share"] <= 0.05
    assert without["tokens"]["wasted_share"] > 0.05
    assert kept["again_s"]["dead"]["p50"] >= figures["scenario"]["lease_s"]


async def test_a_result_that_never_comes_fails_the_run(redis_db: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def forgets_one(lease: Lease, finished: Sequence[Finished]) -> list[str]:
        forgotten.append(finished[0].job_id)
        return await complete(lease, finished) if len(forgotten) > 1 else []

    forgotten, complete = list[str](), Lease.complete
    monkeypatch.setattr(Lease, "complete", forgets_one)
    scenario = Scenario(minutes=5, min_workers=4, max_workers=4, tokens=1000, preempted_per_hour=0)
    with pytest.raises(BenchFailed, match="1 jobs have no outcome, 0 results came twice, 0 were wrong"):
        await simulate(redis_db, scenario, 0, True, print)


def test_the_oracle_sees_what_is_twice_wrong_and_open() -> None:
    def result(sample: int, end: int) -> RolloutResult:
        return RolloutResult(
            job_id="a", sample=sample, n=2, group_id="a", token_ids=script(0, end), finish_reason="length",
            segments=(Segment(0, end),), worker_id="w", attempt=1,
        )  # fmt: skip

    oracle = Oracle()
    oracle.submitted("a", [3, 4])
    oracle.submitted("b", [5])
    oracle.submitted("c", [5])
    oracle.generated = 12
    oracle.arrived(result(0, 3))
    oracle.arrived(result(0, 3))
    assert (oracle.twice, oracle.wrong) == (1, 0)
    oracle.arrived(result(1, 3))  # a token is missing
    oracle.arrived(JobFailure(job_id="b", outcome="dead", cause="test"))
    assert (oracle.twice, oracle.wrong, oracle.failed, oracle.samples) == (1, 1, 1, 2)
    assert oracle.wasted == 12 - 6
    assert set(oracle.open) == {"c"}


def test_lengths_have_the_mean_that_the_load_is_computed_with() -> None:
    draws = Draws(Scenario(block=1, group=4000), 0)
    assert float(np.mean(draws.lengths())) == pytest.approx(draws.mean_tokens(), rel=0.05)
    assert Draws(Scenario(tokens=100, tokens_spread=0), 0).mean_tokens() == 100


def test_hours_of_gpus_are_counted_by_what_they_do() -> None:
    timeline = Timeline()
    timeline.uses("a", 0)
    timeline.starting = 2
    timeline.advance(1800.0)
    timeline.uses("a", 3)
    timeline.starting = 0
    timeline.advance(3600.0)
    timeline.uses("a", None)
    timeline.advance(7200.0)
    figures = timeline.figures(slots=4)
    assert figures["gpu_hours"] == {"used": 0.5, "idle": 0.5, "starting": 1.0}
    assert figures["slots_used"] == 0.375


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("slot = 4", "slot=4"),
        ("slots = 0", "slots=0"),
        ("min_workers = 5\nmax_workers = 4", "min_workers=5"),
        ("load = [0.5, 11]", "load="),
        ("block = 1\nslots = 1024", "block=1"),
        ("lease_s = 'long'", "lease_s='long'"),
    ],
)
def test_a_scenario_that_cannot_be_is_refused_by_name(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text(text)
    with pytest.raises((InvalidField, ConfigError)) as raised:
        read_scenario(path)
    assert said in str(raised.value)


def test_every_field_of_a_scenario_is_documented() -> None:
    page = (PREEMPTED.parents[1] / "README.md").read_text()
    assert [field for field in Scenario.model_fields if f"`{field}`" not in page] == []


def test_not_all_workers_can_die() -> None:
    with pytest.raises(InvalidField, match="kill"):
        Deaths(workers=4, killed=4)


@pytest.mark.slow
def test_jobs_of_real_workers_that_are_killed_run_again(capsys: pytest.CaptureFixture[str]) -> None:
    figures = harness.run(Plan(workers=6, kill=3, lease=1.0), quiet=True)["deaths"]
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["deaths"] == figures
    assert figures["results"] == figures["jobs"] == 24
    assert figures["recovery_s"]["count"] == figures["jobs_of_the_dead"]
