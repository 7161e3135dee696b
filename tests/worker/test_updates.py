"""What updates cost stays within a share of a worker's time: however often versions come, every sample goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from support.engines.manual import Bench
from support.peers.publishing import WEIGHTS, publisher
from support.pools.pool import check_scripted, eventually, wait_replies, worker
from support.specimens.messages import job

from rolloutmq import PublishHandle, WeightPublisher
from rolloutmq.messages import Broker, SamplingParams
from rolloutmq.messages.model import UpdateMode
from rolloutmq.messages.model.media import Medium
from rolloutmq.sync.publish.hub import Hub, Outgoing
from rolloutmq.sync.tensors import Snapshot
from rolloutmq.worker import updates
from rolloutmq.worker.scripted.engine import ScriptedEngine
from rolloutmq.worker.updates import UpdateBudget

PROMPT = 400
READ_S = 0.04
"""How long the engine takes to read a prompt, one after another."""
SPEED = 250.0


@asynccontextmanager
async def versions_all_the_time(source: WeightPublisher, every_s: float = 0.02) -> AsyncIterator[list[PublishHandle]]:
    handles: list[PublishHandle] = []

    async def publish() -> None:
        while True:
            handles.append(source.publish(len(handles) + 1, WEIGHTS.items()))
            await asyncio.sleep(every_s)

    publishing = asyncio.create_task(publish())
    try:
        yield handles
    finally:
        publishing.cancel()
        await asyncio.wait({publishing})


async def test_a_pool_goes_on_however_often_versions_come(redis_db: str, broker: Broker) -> None:
    """Four prompts take longer to read than the next version takes to come."""
    engine = ScriptedEngine(tokens_per_s=SPEED)
    engine.prefill_per_s = PROMPT / READ_S
    jobs = [job(token_ids=list(range(1, PROMPT)), sampling=SamplingParams(max_new_tokens=300)) for _ in range(4)]
    async with publisher(redis_db, mode="resume") as source, worker(redis_db, engine=engine) as running:
        await broker.enqueue(jobs)
        await eventually(lambda: running.generation.running == len(jobs))
        async with versions_all_the_time(source) as handles:
            replies = await wait_replies(broker, len(jobs), timeout=120)
        reports = [await asyncio.to_thread(handle.wait, 60) for handle in handles]
    for reply in replies:
        result = reply.outcome
        check_scripted(result, PROMPT - 1)
        # The first may be short, because nothing was known of the cost yet. The last is what was left.
        least = 3 * READ_S * len(jobs) * SPEED  # three times as long as all of them took to be read
        assert all(segment.tokens >= least for segment in result.segments[1:-1]), result.segments
        assert result.segments[-1].version > result.segments[0].version
    states = {report.state for report in reports}
    assert states <= {"committed", "superseded", "failed"}
    assert "superseded" in states  # what nobody had begun to take when the next one came
    assert sum(report.state == "committed" for report in reports) >= 2


async def test_a_trainer_keeps_few_versions_however_often_it_publishes(
    redis_db: str, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The committed one, one that nobody has begun to take, and the next. Each may be as large as the model."""
    offered, most, offer, withdraw = set[int](), [0], Hub.offer, Hub.withdraw

    def offers(hub: Hub, snapshot: Snapshot, *more: Any) -> Outgoing:
        offered.add(snapshot.manifest.version)
        most.append(len(offered))
        return offer(hub, snapshot, *more)

    def withdraws(hub: Hub, outgoing: Outgoing, why: str) -> None:
        withdraw(hub, outgoing, why)
        offered.discard(outgoing.snapshot.manifest.version)

    monkeypatch.setattr(Hub, "offer", offers)
    monkeypatch.setattr(Hub, "withdraw", withdraws)
    engine = ScriptedEngine(tokens_per_s=SPEED)
    engine.prefill_per_s = PROMPT / READ_S
    long = job(token_ids=list(range(1, PROMPT)), sampling=SamplingParams(max_new_tokens=4000))
    async with publisher(redis_db) as source, worker(redis_db, engine=engine) as running:
        await broker.enqueue([long])
        await eventually(lambda: running.generation.running)
        async with versions_all_the_time(source) as handles:
            await eventually(lambda: len(handles) > 60)
        await asyncio.to_thread(handles[-1].wait, 60)
        await broker.cancel([long.id])
    assert len(most) > 5
    assert max(most) <= 2


async def test_who_waits_for_a_version_waits_until_the_worker_may_take_it(redis_db: str, broker: Broker) -> None:
    """The worker says that it comes later, so its silence is no failure, however short the time for an answer is."""
    engine = ScriptedEngine(tokens_per_s=SPEED)
    engine.prefill_per_s = PROMPT / 0.5
    long = job(token_ids=list(range(1, PROMPT)), sampling=SamplingParams(max_new_tokens=2000))
    async with (
        publisher(redis_db, mode="resume", join_timeout_s=0.7) as source,
        worker(redis_db, engine=engine) as running,
    ):
        await broker.enqueue([long])
        await eventually(lambda: running.generation.running)
        first = source.publish(1, WEIGHTS.items())
        assert (await asyncio.to_thread(first.wait, 60)).state == "committed"
        second = source.publish(2, WEIGHTS.items())
        report = await asyncio.to_thread(second.wait, 60)
        assert (report.state, report.workers) == ("committed", (running.id,))
        await eventually(lambda: running.generation.updates.tokens_anew >= 2 * PROMPT - 2)
        await broker.cancel([long.id])


async def test_nothing_that_runs_costs_nothing(redis_db: str) -> None:
    async with publisher(redis_db) as source, worker(redis_db) as running:
        for version in range(1, 6):
            report = await asyncio.to_thread(source.publish(version, WEIGHTS.items()).wait, 60)
            assert report.state == "committed"
            assert running.generation.updates.wait_s("resume") == 0.0


async def stopped(bench: Bench) -> list[str]:
    """An update stops what runs; the requests with which it goes on."""
    before = len(bench.engine.requests)
    running = bench.generation.running
    async with bench.generation.updates.timed("resume", 2), bench.generation.in_flight.quiet():
        pass
    await eventually(lambda: len(bench.engine.requests) == before + running)
    return [request.request_id for request in bench.engine.requests[before:]]


async def looked(bench: Bench) -> None:
    """Until it has been looked twice."""
    looks = bench.engine.looks + 2
    await eventually(lambda: bench.engine.looks >= looks)


async def test_the_next_update_waits_until_each_that_was_stopped_goes_on() -> None:
    bench, costs = Bench(), list[Any]()
    its = bench.generation.updates
    its.on_cost = lambda *told: costs.append(told)
    await bench.run(2)
    assert its.wait_s("resume") == 0.0
    first, second = await stopped(bench)
    bench.engine.made[first] = 1
    await looked(bench)
    assert not costs
    assert its.wait_s("resume") > 0
    bench.engine.made[second] = 1
    await eventually(lambda: costs)
    assert costs == [("resume", 2, its.lost_s, 4)]
    assert its.lost_s > 0


async def test_what_is_gone_is_not_waited_for() -> None:
    bench = Bench()
    (dropped, *_), _ = await bench.run(3)
    goes_on, ends, _ = await stopped(bench)
    bench.engine.made[goes_on] = 1
    bench.engine.end(ends, 100)
    dropped.dropped = True
    await eventually(lambda: bench.generation.updates.lost_s)


async def test_what_begins_anew_because_of_media_ends_before_the_next_update() -> None:
    bench = Bench()
    its = bench.generation.updates
    await bench.run(1, token_ids=None, text="a", media=(Medium(kind="image", data=b"1"),))
    (again,) = await stopped(bench)
    bench.engine.made[again] = 1
    await eventually(lambda: its.lost_s)
    assert its.wait_s("resume") > 0
    bench.engine.end(again, 100)
    await eventually(lambda: not its.wait_s("resume"))


def budget(tokens: int = 0, age_s: float = 0.0) -> UpdateBudget:
    """Of a worker that runs one sample with so many tokens, for so many seconds."""
    sample: Any = SimpleNamespace(prompt=range(tokens), age_s=age_s)
    in_flight: Any = SimpleNamespace(running={"one": sample} if tokens else {})
    nothing: Any = SimpleNamespace()
    return UpdateBudget(nothing, nothing, in_flight)


@pytest.mark.parametrize(
    ("tokens", "per_s", "since", "mode"),
    [
        (0, 0.0, 1.0, "resume"),  # nothing runs
        (updates.TRIAL_TOKENS, 0.0, 1.0, "resume"),  # few: how fast it is will be known afterwards
        (updates.TRIAL_TOKENS + 1, 0.0, 1.0, "in_place"),
        (1000, 1000.0, 49.0, "in_place"),  # a second of 49
        (1000, 1000.0, 51.0, "resume"),  # a second of 51
    ],
)
def test_auto_takes_what_costs_less(
    monkeypatch: pytest.MonkeyPatch, tokens: int, per_s: float, since: float, mode: UpdateMode
) -> None:
    its = budget(tokens)
    its._tokens_per_s, its._began = per_s, 100.0
    monkeypatch.setattr(updates.time, "monotonic", lambda: 100.0 + since)
    assert its.choose("auto") == mode
    its._interval_s = 40.0  # between the two updates before
    assert its.choose("auto") == ("in_place" if per_s and tokens else mode)
    assert [its.choose(given) for given in ("resume", "in_place", "drain")] == ["resume", "in_place", "drain"]


def test_the_next_update_waits_three_times_as_long_as_the_last_one_took(monkeypatch: pytest.MonkeyPatch) -> None:
    its = budget(1000)
    now = 100.0
    monkeypatch.setattr(updates.time, "monotonic", lambda: now)
    assert its.wait_s("resume") == 0.0  # nothing is known yet
    its._ended, its._cost_s, its._turn, its._behind_since = 100.0, 2.0, 0.5, 0.0
    assert its.wait_s("resume") == pytest.approx(6.0)
    now = 103.0
    assert its.wait_s("resume") == pytest.approx(3.0)
    now = 110.0
    its._behind_since = 0.0
    assert its.wait_s("resume") == pytest.approx(3.0)  # its turn: half of three times two seconds
    now = 114.0
    assert its.wait_s("resume") == 0.0
    its._ended = 114.0
    assert its.wait_s("drain") == 0.0


@pytest.mark.parametrize(
    ("cost_s", "age_s", "spared_s", "awaited_s"),
    [
        (0.02, 10.0, 0.98, 0.06),  # 2% of its time
        (0.02, 1.0, 0.5, 0.06),  # half of what samples have taken so far
        (0.02, 0.1, 0.06, 0.06),  # a quarter of its time, in any case
        (2.0, 10.0, 6.0, 6.0),
    ],
)
def test_auto_takes_a_version_sooner_if_samples_are_short_or_somebody_waits_for_it(
    monkeypatch: pytest.MonkeyPatch, cost_s: float, age_s: float, spared_s: float, awaited_s: float
) -> None:
    its = budget(1000, age_s)
    its._ended, its._cost_s = 100.0, cost_s
    monkeypatch.setattr(updates.time, "monotonic", lambda: 100.0)
    assert its.wait_s("auto") == pytest.approx(spared_s)
    assert its.wait_s("auto", awaited=True) == pytest.approx(awaited_s)
    assert its.wait_s("in_place") == pytest.approx(awaited_s)


async def test_waiting_for_a_version_is_told_to_a_worker_that_spares_its_time(redis_db: str, broker: Broker) -> None:
    """Alone it would take version 2 after 49 times what version 1 has cost it."""
    engine = ScriptedEngine(tokens_per_s=SPEED)
    engine.prefill_per_s = PROMPT / 0.2
    long = job(token_ids=list(range(1, PROMPT)), sampling=SamplingParams(max_new_tokens=4000))
    async with publisher(redis_db, mode="auto") as source, worker(redis_db, engine=engine) as running:
        await broker.enqueue([long])
        its = running.generation.updates
        await eventually(lambda: running.generation.running)
        source.publish(1, WEIGHTS.items())
        await eventually(lambda: its.lost_s)
        (sample,) = its._running()
        sample._born -= 100.0
        ended, spared_s = its._ended, its.wait_s("auto")
        assert spared_s > 5.0
        report = await asyncio.to_thread(source.publish(2, WEIGHTS.items()).wait, 60)
        assert (report.state, report.workers) == ("committed", (running.id,))
        assert its._began - ended < spared_s
        await broker.cancel([long.id])
