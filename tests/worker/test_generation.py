"""What a worker measures of its engine: how fast one sample would be alone, and how long samples are."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from support.engines.manual import Bench, all_that_can_happen_now

from rolloutmq.worker.generation import CROWD


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=100.0, monotonic=lambda: clock.now)
    monkeypatch.setattr("rolloutmq.worker.generation.time", clock)
    return clock


@pytest.mark.parametrize("ends", ["at once", "one by one"])
async def test_an_engine_is_as_fast_however_its_samples_end(ends: str, clock: SimpleNamespace) -> None:
    bench = Bench(slots=CROWD)
    _, ids = await bench.run(CROWD)
    clock.now += 10.0
    for i, request_id in enumerate(ids):
        bench.engine.end(request_id, 99, "abort")  # and goes on, as after an update
        if ends == "one by one" or i == CROWD - 1:
            await all_that_can_happen_now()
            if ends == "one by one":
                assert bench.generation.running == CROWD
    assert bench.generation.pace == pytest.approx(19.8, rel=0.02), "9.9 tokens a second, when a step took twice as long"


async def test_short_legs_say_nothing_of_an_engine(clock: SimpleNamespace) -> None:
    bench = Bench()
    _, ids = await bench.run(2)
    clock.now += 1.0
    bench.engine.end(ids[0], 7)
    await all_that_can_happen_now()
    assert bench.generation.pace == 0.0
    bench.engine.end(ids[1], 8)
    await all_that_can_happen_now()
    assert bench.generation.pace == pytest.approx(8 * (1 + 2 / CROWD), rel=0.02)


async def test_the_mean_length_is_that_of_ended_samples(clock: SimpleNamespace) -> None:
    bench = Bench(slots=32)
    samples, ids = await bench.run(32)
    for request_id, count in zip(ids[:2], (10, 20), strict=True):
        bench.engine.end(request_id, count)
        await all_that_can_happen_now()
    assert (bench.generation.mean_tokens, len(bench.finished), len(samples)) == (15.0, 2, 32)
