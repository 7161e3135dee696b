"""Episodes on a pool: what is in their rows, where their turns go, how they end, and what is left of them."""

from __future__ import annotations

import asyncio
import re
import threading
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest
from support.pools.episodes import SHORT, Counting, Keep, left, played
from support.pools.pool import check_scripted, eventually, worker
from support.specimens.byte_tokenizer import Bytes

from rolloutmq import (
    BlockingRolloutClient,
    EpisodeLimits,
    InvalidField,
    RolloutBatch,
    RolloutClient,
    RolloutResult,
    SamplingParams,
)
from rolloutmq.producer.episodes import Step
from rolloutmq.worker.scripted.engine import ScriptedEngine


async def test_an_episode_is_what_was_sampled_and_what_was_observed(redis_db: str, client: RolloutClient) -> None:
    async with worker(redis_db):
        episodes = await played(client, Counting, 3, n=2)
    assert [(it.number, it.sample, it.stop, it.reward) for it in episodes] == [
        (number, sample, "done", 6.0) for number in range(3) for sample in range(2)
    ]
    for episode in episodes:
        answers = [turn.result.token_ids.tolist() for turn in episode.turns]
        assert [turn.info["seen"] for turn in episode.turns] == answers
        (row,) = episode.rows()
        assert row.ids.tolist() == [1, 2, episode.task, *answers[0], 1, 1, *answers[1], 2, 2, *answers[2]]
        assert row.mask.tolist() == [0] * 3 + [1] * 4 + [0] * 2 + [1] * 4 + [0] * 2 + [1] * 4
        assert row.turns.tolist() == [-1] * 3 + [0] * 4 + [-1] * 2 + [1] * 4 + [-1] * 2 + [2] * 4
        assert row.versions.tolist() == [0 if it else -1 for it in row.mask]
        assert np.allclose(row.logprobs[row.mask == 1], np.concatenate([it.result.logprobs for it in episode.turns]))
        assert (row.prompt, row.reward, row.group, row.stop) == (3, 6.0, episode.number, "stop")
        check_scripted(episode.turns[-1].result, 15)
    batch = RolloutBatch.of([row for it in episodes for row in it.rows()])
    assert batch.ids.shape == (6, 19)
    assert client.outstanding == 0
    await eventually(lambda: left(client, 0), what="all of it is acknowledged")


async def test_coroutines_and_plain_functions_are_environments(redis_db: str, client: RolloutClient) -> None:
    threads: set[int] = set()

    class Plain(Counting):
        def step(self, answer: RolloutResult) -> Any:
            threads.add(threading.get_ident())
            return super().step(answer)

    class Async(Counting):
        async def reset(self) -> list[int]:  # type: ignore[override]
            return [4]

        async def step(self, answer: RolloutResult) -> Any:
            return Step(None, done=True)

        async def close(self) -> None:  # type: ignore[override]
            self.closed += 1

    async with worker(redis_db):
        (plain,) = await played(client, Plain)
        (other,) = await played(client, Async)
    assert (len(plain.turns), len(other.turns)) == (3, 1)
    assert threading.get_ident() not in threads


class Forgetful(Bytes):
    """Strips the thoughts of earlier answers and shows the last one with an empty thought, as Qwen3's template does."""

    def encode_chat(self, messages: list[dict[str, Any]], *, answer: bool = True, **more: Any) -> np.ndarray:  # type: ignore[type-arg,override]
        shown = [
            {**it, "content": it["content"].rpartition("</think>")[2]} if it["role"] == "assistant" else it
            for it in messages
        ]
        if shown[-1]["role"] == "assistant":
            shown[-1]["content"] = f"<think>\n\n</think>{shown[-1]['content']}"
        return super().encode_chat(shown, answer=answer, **more)


async def test_no_token_drifts_under_a_template_that_would_change_them(redis_db: str, client: RolloutClient) -> None:
    class Chat(Counting):
        def reset(self) -> Any:
            return [{"role": "user", "content": "<think>deep</think>ok"}]

        def step(self, answer: RolloutResult) -> Any:
            seen.append(answer.text or "")
            observation, *rest = super().step(answer)
            return [{"role": "user", "content": f"go on {observation[0]}"}], *rest

    seen: list[str] = []
    tokenizer = Forgetful()
    async with worker(redis_db, engine=ScriptedEngine(echo=True), tokenizer=tokenizer):
        (episode,) = await played(client, Chat, sampling=SamplingParams(max_new_tokens=27))
    assert seen == ["user\n<think>deep</think>ok"] * 3, "what the model thought is in its answers"
    (row,) = episode.rows()
    assert row.ids[row.mask == 1].tolist() == [id_ for it in episode.turns for id_ in it.result.token_ids]
    for turn, after in zip(episode.turns, episode.turns[1:], strict=False):
        before = [*turn.result.prompt_ids, *turn.result.token_ids]  # type: ignore[misc]
        assert after.result.prompt_ids[: len(before)].tolist() == before  # type: ignore[index]
    again = [
        message
        for number, text in enumerate(seen, 1)
        for message in ({"role": "assistant", "content": text}, {"role": "user", "content": f"go on {number}"})
    ]
    opening = [{"role": "user", "content": "<think>deep</think>ok"}]
    rendered = tokenizer.encode_chat(opening + again[:-2])
    assert rendered.tolist() != episode.turns[-1].result.prompt_ids.tolist(), (
        "rendered again it would be another prompt"
    )  # type: ignore[union-attr]


async def test_an_episode_stays_with_its_worker_and_survives_it(redis_db: str, client: RolloutClient) -> None:
    gates, waiting = {2: asyncio.Event(), 4: asyncio.Event()}, []

    class Long(Counting):
        async def step(self, answer: RolloutResult) -> Any:  # type: ignore[override]
            if gate := gates.get(self.turn):
                waiting.append(self.turn)
                await gate.wait()
            return Counting.step(self, answer)

    def make(task: int) -> Long:
        return Long(task, 6)

    async with worker(redis_db) as first:
        playing = asyncio.create_task(played(client, make, 8, prefer_s=30.0))
        await eventually(lambda: len(waiting) == 8)
        async with worker(redis_db) as second:
            gates[2].set()
            await eventually(lambda: len(waiting) == 16)
            await first.die()
            gates[4].set()
            episodes = await asyncio.wait_for(playing, 30)
    for episode in episodes:
        workers = [turn.result.worker_id for turn in episode.turns]
        assert workers == [first.id] * 5 + [second.id], "the one that has its prefix, while it lives"
        assert (episode.stop, int(episode.history.mask.sum())) == ("done", 6 * 4)
        check_scripted(episode.turns[-1].result, 3 + 5 * 6)


async def test_what_hangs_is_ended_and_closed(redis_db: str, client: RolloutClient) -> None:
    release = threading.Event()

    class Hangs(Counting):
        async def reset(self) -> list[int]:  # type: ignore[override]
            return [1]

        def step(self, answer: RolloutResult) -> Any:
            release.wait(60)
            return super().step(answer)

    class HangsInReset(Counting):
        async def reset(self) -> Any:  # type: ignore[override]
            await asyncio.Event().wait()

    hangs, in_reset = Keep(Hangs), Keep(HangsInReset)
    try:
        async with worker(redis_db):
            (step,) = await played(client, hangs, limits=EpisodeLimits(step_s=0.5))
            (reset,) = await played(client, in_reset, limits=EpisodeLimits(step_s=0.05))
            (whole,) = await played(client, hangs, limits=EpisodeLimits(episode_s=0.2))
        (turn,) = await played(client, hangs, limits=EpisodeLimits(turn_s=0.5))  # no worker is left
    finally:
        release.set()
    assert [it.stop for it in (step, reset, whole, turn)] == ["timeout"] * 4
    assert [it.error for it in (step, reset, whole)] == [
        "step took longer than 0.5 s",
        "reset took longer than 0.05 s",
        "the episode took longer than 0.2 s",
    ]
    assert [len(it.turns) for it in (step, reset, turn)] == [1, 0, 0]
    assert (hangs.closed, in_reset.closed) == ([1] * 3, [1])
    assert step.rows()[0].stop == "abort"
    assert turn.rows() == []
    assert (await client.load()).open_jobs == 0, "the turn that came too late is cancelled"
    assert client.outstanding == 0


class Broken(Counting):
    """Task: the method that fails, or what it answers."""

    def reset(self) -> Any:
        if self.task == "reset":
            raise ValueError("no world")
        return self.task if self.task in ("", [], [-1]) else [1]

    def step(self, answer: RolloutResult) -> Any:
        if self.task == "stop":
            raise StopIteration
        if self.task == "exit":
            raise SystemExit(3)
        return {"nan": (None, float("nan"), True, {}), "three": (None, 1.0, True), "done": (None, 0.0, 1, {})}.get(
            str(self.task), (self.task, 1.0, False, {})
        )


@pytest.mark.parametrize(
    ("task", "says"),
    [
        ("reset", "reset: ValueError: no world"),
        ([], "observation=[]: token ids, a text"),
        ([-1], "token_ids"),
        ("stop", "step: RuntimeError: StopIteration"),
        ("exit", "step: RuntimeError: SystemExit: 3"),
        ("nan", "step.reward=nan: a finite number"),
        ("three", "a tuple: observation, reward, done, info"),
        ("done", "step.done=1: True or False"),
        (None, "observation=None"),
        ("text", "this worker has no tokenizer"),
    ],
    ids=str,
)
async def test_what_an_environment_does_wrong_costs_its_episode(
    redis_db: str, client: RolloutClient, task: Any, says: str
) -> None:
    tasks, make = [task, 7], Keep(Broken)

    def either(task: Any) -> Any:
        return Counting(task) if task == 7 else make(task)

    async with worker(redis_db):
        bad, good = sorted(
            [it async for it in client.episodes(tasks, either, sampling=SHORT)], key=lambda it: it.number
        )
    assert (bad.stop, good.stop) == ("failed", "done")
    assert says in str(bad.error)
    assert not bad.ok
    assert good.ok
    assert make.closed == [1]


async def test_an_environment_that_cannot_be_made_costs_its_episode(redis_db: str, client: RolloutClient) -> None:
    (episode,) = await played(client, lambda task: task.nothing)
    assert episode.stop == "failed"
    assert "'int' object has no attribute 'nothing'" in str(episode.error)


async def test_wrong_arguments_are_named_at_once(client: RolloutClient) -> None:
    for name, value in (("n", 0), ("start", -1), ("concurrency", 0), ("run", ""), ("sampling", 3), ("nothing", 1)):
        with pytest.raises(InvalidField) as caught:
            client.episodes([1], Counting, **{name: value})  # type: ignore[arg-type]
        assert caught.value.field == name
    for limit, number in (("turns", 0), ("turn_s", 0.0), ("tokens", 1.5), ("on_full", "shrug"), ("close_s", None)):
        with pytest.raises(InvalidField, match=f"{limit}="):
            EpisodeLimits(**{limit: number})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("max_turns", "nearest: limits=EpisodeLimits(turns=...)"),
        ("turns", "limits=EpisodeLimits(turns=3)"),
        ("temperature", "sampling=SamplingParams(temperature=3)"),
        ("concurency", "nearest: concurrency"),
        ("text", "episodes has no such argument"),
    ],
)
async def test_an_unknown_argument_is_told_where_it_belongs(client: RolloutClient, name: str, told: str) -> None:
    with pytest.raises(InvalidField, match=re.escape(told)) as caught:
        client.episodes([1], Counting, **{name: 3})  # type: ignore[arg-type]
    assert caught.value.field == name


async def test_leaving_cancels_what_is_under_way_and_closes_it(redis_db: str, client: RolloutClient) -> None:
    make = Keep(Counting)
    async with worker(redis_db, engine=ScriptedEngine(tokens_per_s=100.0)):
        long = SamplingParams(max_new_tokens=100_000)
        playing = asyncio.create_task(played(client, make, 20, sampling=long, concurrency=8))
        await eventually(lambda: client.outstanding == 8)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        assert make.closed == [1] * 8
        assert client.outstanding == 0
        assert (await client.load()).open_jobs == 0
        async with aclosing(client.episodes(range(9), make, sampling=SHORT)) as episodes:
            await anext(episodes)
        assert make.closed == [1] * 17
        assert client.outstanding == 0
        assert [it async for it in client.results(5)] == [], "their outcomes are nobody's"


async def test_many_at_once_within_the_window(redis_db: str, client: RolloutClient) -> None:
    alive = most = 0

    class Counted(Counting):
        def __init__(self, task: int) -> None:
            nonlocal alive, most
            super().__init__(task)
            alive += 1
            most = max(most, alive)

        async def close(self) -> None:  # type: ignore[override]
            nonlocal alive
            alive -= 1

    async with worker(redis_db, max_running=64):
        episodes = await played(client, Counted, 150, concurrency=64)
    assert len(episodes) == 150
    assert all(it.stop == "done" for it in episodes)
    assert (alive, most) == (0, 64)


def test_plain_loops_play_them_too(redis_db: str) -> None:
    async def serve(done: threading.Event, ready: threading.Event) -> None:
        async with worker(redis_db):
            ready.set()
            await asyncio.to_thread(done.wait)

    done, ready = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(serve(done, ready)))
    thread.start()
    try:
        ready.wait(20)
        with BlockingRolloutClient(redis_db) as client:
            rewards = [it.reward for it in client.episodes(range(5), Counting, sampling=SHORT)]
            assert client.outstanding == 0
    finally:
        done.set()
        thread.join()
    assert rewards == [6.0] * 5
