"""`python -m benchmarks idle` at a small size: real clients and workers, and what it counts."""

from __future__ import annotations

import json

import pytest

from benchmarks import harness
from benchmarks.broker.idle import Plan


@pytest.mark.slow
def test_it_counts_connections_and_commands(capsys: pytest.CaptureFixture[str]) -> None:
    figures = harness.run(Plan(clients=3, workers=2, settle_s=0.0, seconds=3.0), quiet=True)
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == figures
    assert 0.0 < figures["redis_cpu_share"] < 1.0
    assert 3 + 2 * 3 <= figures["connections"] <= figures["maxclients"]
    assert figures["commands_per_s"]["zadd"] >= 1.0  # heartbeats
    assert figures["commands_per_s"]["xread"] > 0.0
