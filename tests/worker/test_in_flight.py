"""Which version sampled which token when weights change under running legs, and what waits meanwhile."""

from __future__ import annotations

import asyncio
import contextlib

import numpy as np
import pytest
from support.engines.manual import Bench, all_that_can_happen_now
from support.pools.pool import eventually

from rolloutmq.messages.errors import EngineDead
from rolloutmq.messages.model.jobs import GenerateJob
from rolloutmq.messages.model.results import Segment
from rolloutmq.messages.model.sampling import SamplingParams
from rolloutmq.worker.jobs.legs import Leg
from rolloutmq.worker.jobs.sample import SampleRun


@pytest.mark.parametrize(
    ("switches", "count", "expected"),
    [
        ([], 5, [(1, 5)]),
        ([], 0, []),
        ([(2, 0)], 5, [(2, 5)]),
        ([(2, 3)], 5, [(1, 3), (2, 2)]),
        ([(2, 5)], 5, [(1, 5)]),
        ([(2, 9)], 5, [(1, 5)]),  # ended in the batch that ran at the switch, before its last tokens
        ([(2, 3), (3, 4)], 6, [(1, 3), (2, 1), (3, 2)]),
        ([(2, 3), (3, 3)], 6, [(1, 3), (3, 3)]),
        ([(2, 0), (3, 0)], 2, [(3, 2)]),
        ([(2, 3), (3, 9)], 4, [(1, 3), (2, 1)]),
    ],
)
def test_segments_of_a_leg(switches: list[tuple[int, int]], count: int, expected: list[tuple[int, int]]) -> None:
    leg = Leg("a", 1)
    for version, at in switches:
        leg.switch(version, at)
    assert leg.segments(count) == [Segment(*pair) for pair in expected]
    assert leg.in_place(count) == sorted({at for _, at in switches if at < count})


async def test_legs_that_end_during_a_switch_wait_and_are_told_apart() -> None:
    bench = Bench()
    (before, during, after), ids = await bench.run(3)
    async with bench.generation.in_flight.switching():
        bench.engine.end(ids[0], 10)  # ended before the switch: the engine does not count it
        bench.engine.end(ids[1], 20)
        await all_that_can_happen_now()
        assert bench.finished == []
        assert bench.generation.running == 3
        bench.switched(2, {ids[1]: 15, ids[2]: 16})
        assert bench.finished == []
    bench.engine.end(ids[2], 30)
    await eventually(lambda: len(bench.finished) == 3)
    assert before.segments == [Segment(1, 10)]
    assert during.segments == [Segment(1, 15), Segment(2, 5)]
    assert after.segments == [Segment(1, 16), Segment(2, 14)]
    assert [(one.legs, one.in_place) for one in (before, during, after)] == [([], []), ([], [15]), ([], [16])]
    assert after.tokens.tolist() == list(range(30))
    assert bench.generation.generated_tokens == 60
    assert bench.deaths == 0


async def test_two_switches_in_one_leg_and_the_next_leg_is_new() -> None:
    bench = Bench()
    (sample,), (first,) = await bench.run(1)
    for version, at in ((2, 4), (3, 9)):
        async with bench.generation.in_flight.switching():
            bench.switched(version, {first: at})
    bench.engine.end(first, 12, "abort")
    await eventually(lambda: len(bench.engine.requests) == 2)
    second = bench.engine.requests[1]
    assert (second.cache_key, second.max_new_tokens) == ("3", 88)
    bench.engine.end(second.request_id, 88)
    await eventually(lambda: bench.finished)
    assert sample.segments == [Segment(1, 4), Segment(2, 5), Segment(3, 91)]
    assert (sample.legs, sample.in_place) == ([12], [4, 9])


async def test_of_which_there_was_no_cache_is_not_in_place() -> None:
    bench = Bench()
    (waiting, retracted, reading), ids = await bench.run(3)
    async with bench.generation.in_flight.switching():
        bench.switched(2, {ids[0]: 0, ids[1]: 3, ids[2]: 0}, anew=ids[:2])
    async with bench.generation.in_flight.switching():
        bench.switched(3, {ids[0]: 4, ids[1]: 5, ids[2]: 6})
    for request_id in ids:
        bench.engine.end(request_id, 9)
    await eventually(lambda: len(bench.finished) == 3)
    assert (waiting.segments, waiting.legs, waiting.in_place) == ([Segment(2, 4), Segment(3, 5)], [], [4])
    assert retracted.segments == [Segment(1, 3), Segment(2, 2), Segment(3, 4)]
    assert (retracted.legs, retracted.in_place) == ([3], [5])
    assert (reading.segments, reading.in_place) == ([Segment(2, 6), Segment(3, 3)], [0, 6])


def test_a_second_switch_while_a_cache_is_computed_is_told_beside_the_first() -> None:
    leg = Leg("a", 1)
    leg.switch(2, 3, anew=True)
    leg.switch(3, 3)
    assert (leg.computed(9), leg.in_place(9)) == ([3], [3])


async def test_the_gate_is_shut_during_a_switch_and_what_waited_starts_under_the_new_version() -> None:
    bench = Bench(slots=2)
    job = GenerateJob(token_ids=[1], n=4, sampling=SamplingParams(max_new_tokens=5))
    bench.generation.add([SampleRun(job, np.array([1], np.int32), i, 1, 0.0) for i in range(4)])
    assert bench.engine.requests == []  # their tasks have not run yet
    async with bench.generation.in_flight.switching():
        assert len(bench.engine.requests) == 2  # now they have: the engine hears of them before it hears of the switch
        ids = [request.request_id for request in bench.engine.requests]
        for request_id in ids:
            bench.engine.end(request_id, 5)
        await all_that_can_happen_now()
        assert len(bench.engine.requests) == 2
        bench.switched(2, dict.fromkeys(ids, 5))
    await eventually(lambda: len(bench.engine.requests) == 4)
    assert [request.cache_key for request in bench.engine.requests] == ["1", "1", "2", "2"]


async def test_nothing_of_a_running_leg_is_saved_during_a_switch() -> None:
    bench = Bench()
    (sample,), (request_id,) = await bench.run(1)
    bench.engine.made[request_id] = 6
    piece = sample.unsaved(bench.engine.progress)
    assert piece.partial.segments == (Segment(1, 6),)
    sample.keep_saved(piece)
    async with bench.generation.in_flight.switching():
        bench.engine.made[request_id] = 12
        assert sample.unsaved(bench.engine.progress) is None
        bench.switched(2, {request_id: 8})
    piece = sample.unsaved(bench.engine.progress)
    assert (piece.partial.start, piece.partial.segments) == (6, (Segment(1, 2), Segment(2, 4)))
    sample.keep_saved(piece)
    bench.engine.made[request_id] = 15
    piece = sample.unsaved(bench.engine.progress)
    assert (piece.partial.start, piece.partial.segments) == (12, (Segment(2, 3),))
    bench.engine.end(request_id, 20)
    await eventually(lambda: bench.finished)
    assert sample.segments == [Segment(1, 8), Segment(2, 12)]


async def test_a_commit_that_fails_with_the_weights_intact_changes_nothing() -> None:
    bench = Bench()
    (ended, running), ids = await bench.run(2)
    async with bench.generation.in_flight.switching():
        bench.engine.end(ids[0], 7)
    bench.engine.end(ids[1], 9)
    await eventually(lambda: len(bench.finished) == 2)
    assert bench.generation.version == 1
    assert ended.segments == [Segment(1, 7)]
    assert running.segments == [Segment(1, 9)]


@pytest.mark.parametrize("how", ["said", "raised"])
async def test_what_half_written_weights_may_have_sampled_is_thrown_away(how: str) -> None:
    bench = Bench()
    (ended, running), ids = await bench.run(2)
    bench.engine.made[ids[1]] = 5
    with contextlib.suppress(EngineDead):
        async with bench.generation.in_flight.switching():
            bench.engine.end(ids[0], 7)
            await asyncio.sleep(0)
            if how == "raised":
                raise EngineDead("gone")
            bench.generation.in_flight.spoiled()
    assert running.unsaved(bench.engine.progress) is None
    bench.engine.end(ids[1], 9)
    await eventually(lambda: len(bench.generation.died_with) == 2)
    assert bench.finished == []
    assert [len(sample.tokens) for sample in (ended, running)] == [0, 0]
    assert bench.deaths == 2


async def test_an_engine_that_dies_during_a_switch_keeps_nobody_waiting() -> None:
    bench = Bench()
    (sample,), (request_id,) = await bench.run(1)
    async with bench.generation.in_flight.switching():
        bench.engine.ends[request_id].set_exception(EngineDead("gone"))
        await eventually(lambda: bench.generation.died_with)
        assert bench.generation.died_with == [sample]
        assert bench.generation.running == 0


async def test_an_interruption_waits_for_the_switch() -> None:
    bench = Bench()
    (sample,), (request_id,) = await bench.run(1)
    bench.engine.made[request_id] = 5
    async with bench.generation.in_flight.switching():
        bench.generation.gate.holder("drain").acquire()
        # 0 s, because the time of the switch does not count
        stopping = asyncio.create_task(bench.generation.in_flight.interrupt(0.0))
        await all_that_can_happen_now()
        assert not stopping.done()
        assert not bench.engine.ends[request_id].done()
        bench.switched(2, {request_id: 3})
    assert await stopping
    assert sample.segments == [Segment(1, 3), Segment(2, 2)]


async def test_weights_are_switched_only_inside_a_switch() -> None:
    bench = Bench()
    with pytest.raises(RuntimeError, match="inside"):
        bench.switched(2, {})
    assert bench.generation.version == 1


def deaf() -> tuple[Bench, list[str]]:
    """An engine that lets go of nothing, and what it was told to abort."""
    bench, aborted = Bench(), list[str]()
    bench.engine.abort = aborted.append  # type: ignore[attr-defined]
    return bench, aborted


async def test_what_is_taken_out_is_told_once_however_many_others_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rolloutmq.worker.in_flight.ABORT_AGAIN_S", 600.0)
    bench, aborted = deaf()
    samples, ids = await bench.run(6)
    taking = asyncio.create_task(bench.generation.take_out(samples[:2]))
    for request_id in ids[2:]:
        bench.engine.end(request_id, 10)
        await all_that_can_happen_now()
    for request_id in ids[:2]:
        bench.engine.end(request_id, 5, "abort")
        await all_that_can_happen_now()
    assert sorted(await taking, key=lambda one: one.index) == samples[:2]
    assert aborted == ids[:2]
    assert bench.generation.running == 0
    bench.generation.put_back(samples[:2])
    assert bench.generation.running == 2


async def test_what_is_not_let_go_is_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rolloutmq.worker.in_flight.ABORT_AGAIN_S", 0.01)
    bench, aborted = deaf()
    samples, ids = await bench.run(1)
    taking = asyncio.create_task(bench.generation.take_out(samples))
    await eventually(lambda: len(aborted) >= 3, what="again and again")
    bench.engine.end(ids[0], 5, "abort")
    assert await taking == samples


async def test_who_is_to_end_with_what_it_has_does_so_though_the_engine_dies() -> None:
    bench = Bench()
    (ending, other), ids = await bench.run(2)
    ending.ending = True
    for request_id in ids:
        bench.engine.ends[request_id].set_exception(EngineDead("gone"))
    await eventually(lambda: bench.generation.died_with and bench.finished)
    assert (bench.finished, bench.generation.died_with) == ([ending], [other])
    assert ending.finish_reason == "abort"
