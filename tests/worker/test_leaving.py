"""A drain takes what it was given, however slow Redis and the engine are."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from support.pools.pool import check_scripted, eventually, record, wait_replies, worker
from support.specimens.messages import job

from rolloutmq.messages import Broker, Lease, SamplingParams
from rolloutmq.worker.gate import Gate
from rolloutmq.worker.leaving import LEAVE_S, LeaveBy, Leaving
from rolloutmq.worker.scripted.engine import ScriptedEngine


class Slow:
    """Everything a leaving worker asks takes as long as it may, or `call_s` where nobody waits for less."""

    def __init__(self, call_s: float) -> None:
        self.now, self.call_s = 0.0, call_s
        in_flight = SimpleNamespace(idle=self.wait, interrupt=self.wait)
        self.generation: Any = SimpleNamespace(gate=Gate(), in_flight=in_flight, running=1)
        self.held: list[Any] = []

    def monotonic(self) -> float:
        return self.now

    async def wait(self, timeout_s: float) -> bool:
        self.now += timeout_s
        return False

    async def call(self, *_: Any) -> int:
        self.now += self.call_s
        return 0


@pytest.mark.parametrize("drain_s", [2.0, 5.0, 30.0])
@pytest.mark.parametrize("part", [0.0, 0.1, 0.2, 0.3, 0.9])
async def test_a_drain_ends_within_its_budget(drain_s: float, part: float, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow(part * drain_s)
    monkeypatch.setattr("rolloutmq.worker.leaving.time", slow)

    async def at_most(*_: Any, **__: Any) -> None:
        """Redis answers just before the time is over, or not at all."""
        if slow.now + slow.call_s > drain_s:
            slow.now = max(slow.now, drain_s)
            raise TimeoutError
        slow.now += slow.call_s

    names = dict.fromkeys(("release", "release_claims", "flushed", "settled", "leave"), at_most)
    parts: Any = SimpleNamespace(**names, jobs=set, progress=None)
    leaving = Leaving(parts, slow.generation, slow.held, parts, parts)  # type: ignore[arg-type]
    leaving.by.within(drain_s)
    await leaving.leave(parts, [], at_most)
    assert slow.now <= drain_s
    assert slow.generation.gate.reasons == ["drain"]


async def test_a_worker_leaves_though_redis_answers_nothing(
    redis_db: str, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def silent(*_: Any) -> Any:
        await asyncio.Event().wait()

    async with worker(redis_db, engine=ScriptedEngine(tokens_per_s=1.0), drain_s=0.0) as running:
        await broker.enqueue([job(sampling=SamplingParams(max_new_tokens=1000))])
        await eventually(lambda: running.generation.running)
        for call in ("claim", "complete", "release", "leave"):
            monkeypatch.setattr(Lease, call, silent)
        running.worker.drain()
        await running.task


def test_the_end_of_a_drain_only_comes_nearer(monkeypatch: pytest.MonkeyPatch) -> None:
    slow, by = Slow(0.0), LeaveBy()
    monkeypatch.setattr("rolloutmq.worker.leaving.time", slow)
    by.within(30.0)
    slow.now = 10.0
    by.within(30.0)  # a second SIGTERM
    assert by.left() == 20.0
    by.within(4.0)
    by.within(600.0)
    assert by.left() == 4.0
    by.within(0.0)
    assert by.left() == LEAVE_S


async def test_a_limit_under_way_is_shortened() -> None:
    by = LeaveBy()
    by.within(600.0)

    async def wait() -> None:
        async with by.limit():
            by.within(LEAVE_S)
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        await wait()


class Deaf(ScriptedEngine):
    """Does not let go of what it runs; or breaks when it is asked to."""

    def __init__(self, how: str) -> None:
        super().__init__(tokens_per_s=200.0)
        self.how = how

    def abort_all(self) -> None:
        if self.how == "raises":
            raise OSError("the pipe is broken")


@pytest.mark.parametrize("how", ["hangs", "raises"])
async def test_what_an_engine_has_that_does_not_let_go_is_handed_over(
    redis_db: str, broker: Broker, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr("rolloutmq.worker.leaving.LEAVE_S", 0.5)
    one = job(sampling=SamplingParams(max_new_tokens=1000))
    async with worker(redis_db, engine=Deaf(how), drain_s=0.0, checkpoint_s=600.0, max_lost=1) as running:
        await broker.enqueue([one])
        await eventually(lambda: running.generation.generated_tokens or max(running.sampled, default=0) >= 20)
        await running.stop()
    assert b"c" not in await record(broker, one.id), "it counts as a loss"
    async with worker(redis_db, max_lost=1) as second:
        (reply,) = await wait_replies(broker, 1)
    found = reply.outcome
    assert (found.worker_id, found.attempt, len(found.token_ids)) == (second.id, 2, 1000)
    assert found.legs[0] >= 20, "the second worker did not begin again"
    check_scripted(found, len(one.token_ids))
