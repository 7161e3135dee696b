"""A client that crashes within episodes and starts again: no answer is generated twice."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
from support.pools import episodes as support_episodes
from support.pools.clients import close_unacknowledged
from support.pools.episodes import SHORT, Counting, Keep, left, played
from support.pools.pool import check_scripted, eventually, worker

from rolloutmq import Episode, RolloutClient, RolloutMQError, RolloutResult
from rolloutmq.worker.engine import EngineOutput, EngineRequest
from rolloutmq.worker.scripted.engine import ScriptedEngine

TASKS = range(6)
FIRST_PROMPT = 3
TESTS = Path(__file__).parents[2]


class Gated(Counting):
    """From task 2 on, it waits in its second step until the gate opens."""

    gate: asyncio.Event

    async def step(self, answer: RolloutResult) -> Any:  # type: ignore[override]
        if self.task >= 2 and self.turn == 1:
            await self.gate.wait()
        return Counting.step(self, answer)


async def play(client: RolloutClient, make: Any, start: int = 0) -> list[Episode]:
    episodes = client.episodes(TASKS[start:], make, run="run", start=start, sampling=SHORT)
    return sorted([it async for it in episodes], key=lambda it: it.number)


async def crashed(url: str) -> tuple[list[Episode], Keep]:
    """A client that got the first two episodes, came back for the next one, and crashed within the others."""
    Gated.gate = asyncio.Event()
    make, got = Keep(Gated), list[Episode]()
    client = RolloutClient(url, client_id="client")

    async def consume() -> None:
        async for episode in client.episodes(TASKS, make, run="run", sampling=SHORT):
            got.append(episode)

    consuming = asyncio.create_task(consume())
    await eventually(lambda: len(got) == 2 and sum(it.turn for it in make.made) == 2 * 3 + 4 * 1)
    await eventually(lambda: client.outstanding == 0)
    await eventually(lambda: left(client, 4 * 2), what="what was handed out is acknowledged, and no more")
    await close_unacknowledged(client)
    Gated.gate.set()
    with pytest.raises(RolloutMQError):
        await consuming
    return got, make


async def test_answers_that_were_complete_are_not_generated_again(redis_db: str) -> None:
    async with worker(redis_db):
        before, made = await crashed(redis_db)
        assert sorted(it.number for it in before) == [0, 1]
        assert made.closed == [1] * 6
        async with RolloutClient(redis_db, client_id="client") as client:
            accepted = (await client.load()).accepted
            after = await play(client, Counting, start=2)
            await eventually(lambda: left(client, 0))
            load = await client.load()
    assert [(it.number, it.stop, len(it.turns)) for it in after] == [(number, "done", 3) for number in TASKS[2:]]
    assert accepted == 2 * 3 + 4 * 2
    assert load.accepted == 6 * 3, "one job for each answer, before and after"


class Held(ScriptedEngine):
    """It answers prompts of a first turn at once, and others when the gate opens. begun: the ids of all requests."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.begun = asyncio.Event(), list[str]()

    async def generate(self, request: EngineRequest) -> EngineOutput:
        self.begun.append(request.request_id)
        if len(request.token_ids) > FIRST_PROMPT:
            await self.gate.wait()
        return await super().generate(request)


@pytest.mark.parametrize("ready", ["after the restart", "before the restart"])
async def test_an_answer_under_way_when_the_process_is_killed_is_generated_once(redis_db: str, ready: str) -> None:
    count = len(TASKS)
    asked = [sys.executable, "-m", support_episodes.__name__, redis_db, str(count)]
    make, engine = Keep(Counting), Held()
    async with worker(redis_db, engine=engine) as running:
        process = await asyncio.create_subprocess_exec(*asked, cwd=TESTS)
        try:
            await eventually(lambda: len(engine.begun) == 2 * count, what="the second answers are under way")
        finally:
            process.kill()
            await process.wait()
        async with RolloutClient(redis_db, client_id="client") as client:
            if ready == "before the restart":
                engine.gate.set()
                await eventually(lambda: left(client, 2 * count))
            playing = asyncio.create_task(played(client, make, count, run="run"))
            if ready == "after the restart":
                await eventually(lambda: [it.turn for it in make.made] == [1] * count and client.outstanding == count)
                engine.gate.set()
            after = await asyncio.wait_for(playing, 30)
            await eventually(lambda: left(client, 0))
            load = await client.load()
    assert [(it.stop, len(it.turns)) for it in after] == [("done", 3)] * count
    for episode in after:
        for turn in episode.turns:
            check_scripted(turn.result, turn.start)
    assert load.accepted == 3 * count, "one job for each answer"
    assert len(set(engine.begun)) == len(engine.begun) == 3 * count, "the engine was asked for each answer once"
    assert running.generation.generated_tokens == 3 * count * SHORT.max_new_tokens


async def test_an_environment_that_does_otherwise_is_asked_anew(redis_db: str) -> None:
    class Other(Counting):
        def reset(self) -> list[int]:
            return [9]

    async with worker(redis_db):
        await crashed(redis_db)
        async with RolloutClient(redis_db, client_id="client") as client:
            after = await play(client, Other, start=2)
            assert [(it.stop, it.history.token_ids[0]) for it in after] == [("done", 9)] * 4
            assert [it async for it in client.results(5)] == [], "what the first process left is nobody's"
            await eventually(lambda: left(client, 0))


async def test_what_was_handed_out_can_be_played_again(redis_db: str, client: RolloutClient) -> None:
    async with worker(redis_db):
        first = await play(client, Counting)
        second = await play(client, Counting)
    assert [it.stop for it in (*first, *second)] == ["done"] * 12
    assert {it.turns[0].result.job_id for it in first}.isdisjoint({it.turns[0].result.job_id for it in second})
    await eventually(lambda: left(client, 0))


async def test_a_cancelled_job_ends_its_episode(redis_db: str, client: RolloutClient) -> None:
    """Asked for under another id, it would have been cancelled in vain."""
    playing = asyncio.create_task(play(client, Counting, start=5))
    await eventually(lambda: client.outstanding == 1)

    async def cancelled() -> bool:
        return bool(await client.cancel_all())

    await eventually(cancelled)
    (episode,) = await asyncio.wait_for(playing, 20)
    assert episode.stop == "failed"
    assert "cancelled" in str(episode.error)
