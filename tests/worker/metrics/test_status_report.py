"""What a worker says about itself."""

from __future__ import annotations

import pytest

from rolloutmq.worker.metrics.status import Pace


def test_a_rate_is_over_the_last_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("rolloutmq.worker.metrics.status.time.monotonic", lambda: now)
    pace, rates = Pace(), []
    for beat in range(40):
        now += 1.0
        rates.append(pace.per_s(100 * min(beat, 20)))  # it stops after 20 s
    assert (rates[0], rates[19], rates[25], rates[39]) == (0.0, 100.0, 50.0, 0.0)
