"""Jobs that generate nothing go through the same queue: results once, in order, cancelled, refused by name."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from redis.asyncio import Redis
from support.pools.pool import eventually, worker
from support.specimens.messages import tokens

from rolloutmq import RolloutClient
from rolloutmq.messages import Broker, GenerateJob, JobFailed, WaitTimeout
from rolloutmq.messages.broker.broker import Caps
from rolloutmq.messages.errors import FeatureUnavailable, InvalidField
from rolloutmq.messages.model.tasks import EmbedJob, ScoreJob
from rolloutmq.producer import similarity
from rolloutmq.worker.scripted.engine import ScriptedEngine, scripted_logprob


class Pooling(ScriptedEngine):
    """Embeds and rewards: (length, sum, version) of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.tasks = frozenset({"task:embed", "task:reward"})


async def test_scores_come_back_in_order_with_version_sum_and_mean(redis_db: str) -> None:
    continuations = [[10 + i, 20 + i] for i in range(150)]  # three jobs
    async with worker(redis_db), RolloutClient(redis_db) as client:
        results = await client.score([1, 2, 3], continuations, timeout=10, metadata={"k": 1})
    assert len(results) == 150
    for ids, result in zip(continuations, results, strict=True):
        expected = np.array([scripted_logprob(token) for token in ids], np.float32)
        np.testing.assert_array_equal(result.logprobs, expected)
        assert result.sum == pytest.approx(float(expected.sum()))
        assert result.mean == pytest.approx(float(expected.mean()))
        assert (result.version, result.tokens, result.metadata) == (0, 5, {"k": 1})


async def test_embeddings_are_an_array_and_rewards_a_list(redis_db: str) -> None:
    async with worker(redis_db, engine=Pooling()), RolloutClient(redis_db) as client:
        vectors = await client.embed([[1, 2], np.array([3, 4, 5])], timeout=10)
        short = await client.embed([[1, 2]], dimensions=1, timeout=10)
        (scored,) = await client.reward([[7, 8]], timeout=10)
    np.testing.assert_array_equal(vectors, np.array([[2, 3, 0], [3, 12, 0]], np.float32))
    np.testing.assert_array_equal(short, np.array([[2]], np.float32))
    assert scored.score == 2.0


@pytest.mark.one_shard
async def test_each_kind_of_worker_refuses_the_other_kind_of_job_by_name(redis_db: str, broker: Broker) -> None:
    async with worker(redis_db, engine=Pooling()), RolloutClient(redis_db) as client:
        with pytest.raises(JobFailed, match=r"does not generate.*task:embed"):
            await client.wait(await client.submit(tokens()), 10)
        with pytest.raises(FeatureUnavailable, match="task:score"):
            await client.score([1], [[2]], timeout=10)
        await broker.enqueue([ScoreJob(reply_to="client", token_ids=[1], continuations=[[2]])])
        replies = await eventually(lambda: broker.read_replies("client", "0"), what="the refusal")
    assert "task:score: not on this worker" in replies[0].outcome.error
    async with worker(redis_db), RolloutClient(redis_db) as client:
        with pytest.raises(FeatureUnavailable, match="task:embed"):
            await client.embed([[1]], timeout=10)


async def test_a_loop_over_results_never_takes_what_a_task_waits_for(redis_db: str) -> None:
    async with worker(redis_db), RolloutClient(redis_db) as client:
        taken: list[str] = []

        async def loop() -> None:
            jobs = await client.submit_many(tokens(n=2) for _ in range(20))
            async for outcome in client.results(timeout=10):
                taken.append(outcome.job_id)
            assert sorted(taken) == sorted(job.job_id for job in jobs for _ in range(2))

        scores = [client.score([1, 2], [[3], [4]], timeout=10) for _ in range(20)]
        *found, _ = await asyncio.gather(*scores, loop())
        assert [len(results) for results in found] == [2] * 20
        assert client.outstanding == 0


async def test_a_call_may_bring_more_than_a_client_may_leave_unread(redis_db: str) -> None:
    caps = Caps(jobs=2, unread=1000)  # less than what comes of one job
    async with worker(redis_db, engine=Pooling()), RolloutClient(redis_db, caps=caps) as client:
        vectors = await client.embed([[1, i] for i in range(300)], timeout=30)
    assert vectors[:, 1].tolist() == [1 + i for i in range(300)]


async def test_a_pool_that_stays_full_is_a_timeout_and_leaves_nothing(redis_db: str) -> None:
    async with RolloutClient(redis_db, caps=Caps(jobs=1)) as client:
        with pytest.raises(WaitTimeout, match=r"1 jobs are open|nothing arrived"):
            await client.score([1], [[2]] * 100, timeout=0.3)
        load = await client.load()
        assert (load.cancelled, load.open_jobs, client.outstanding) == (load.accepted, 0, 0)


async def test_a_task_nobody_waits_for_any_more_is_cancelled_and_leaves_nothing(redis_db: str, db: Redis) -> None:
    async with RolloutClient(redis_db) as client:
        with pytest.raises(WaitTimeout):
            await client.score([1], [[2]], timeout=0.2)
        load = await client.load()
        assert (load.cancelled, load.open_jobs) == (load.accepted, 0)
        handle = await client.submit(tokens())
        async with worker(redis_db):
            assert len(await client.wait(handle, 10)) == 1
            assert len(await client.score([1], [[2]], timeout=10)) == 1
            assert [outcome async for outcome in client.results(timeout=1)] == []
    assert await Broker(db, "default").unread() == {}


@pytest.mark.one_shard
async def test_the_results_of_a_client_that_crashed_in_a_task_are_dropped_by_the_next(redis_db: str, db: Redis) -> None:
    broker = Broker(db, "default")
    await broker.enqueue([ScoreJob(reply_to="trainer", token_ids=[1], continuations=[[2], [3]])])
    async with worker(redis_db), RolloutClient(redis_db, client_id="trainer") as client:
        assert [outcome async for outcome in client.results(timeout=10)] == []
        assert (await client.load()).done == 1
    assert await broker.unread() == {}


@pytest.mark.parametrize(
    ("kind", "fields", "name"),
    [
        (EmbedJob, {}, "EmbedJob"),
        (EmbedJob, {"texts": ["a"], "token_ids": [[1]]}, "EmbedJob"),
        (EmbedJob, {"texts": []}, "texts"),
        (EmbedJob, {"token_ids": [[]]}, "EmbedJob"),
        (EmbedJob, {"texts": ["a"], "dimensions": 0}, "dimensions"),
        (EmbedJob, {"token_ids": [[1]] * 5000}, "EmbedJob"),
        (ScoreJob, {"token_ids": [1]}, "ScoreJob"),
        (ScoreJob, {"token_ids": [1], "continuations": [[1], []]}, "ScoreJob"),
        (ScoreJob, {"text": "a", "messages": [], "texts": ["b"]}, "messages"),
    ],
)
def test_a_task_that_makes_no_sense_is_refused_by_name(kind: type[EmbedJob], fields: dict, name: str) -> None:
    with pytest.raises(InvalidField) as refused:
        kind.build(**fields)
    assert refused.value.field == name


@pytest.mark.parametrize("inputs", [None, 5, [{"role": "user", "content": "a"}], iter(["a"]), ["a", [1]], "a", [[]]])
async def test_what_are_no_inputs_is_said_before_anything_is_sent(redis_db: str, inputs: Any) -> None:
    async with RolloutClient(redis_db) as client:
        with pytest.raises(InvalidField, match="inputs"):
            await client.embed(inputs, timeout=1)


def test_similarity_is_the_cosine() -> None:
    a, b = np.array([[1.0, 0.0], [1.0, 1.0]]), np.array([[0.0, 2.0], [3.0, 0.0], [0.0, 0.0]])
    np.testing.assert_allclose(similarity(a, b), [[0, 1, 0], [2**-0.5, 2**-0.5, 0]], atol=1e-6)
    assert similarity(a[0], b[1]) == pytest.approx(1.0)
    with pytest.raises(InvalidField, match="same d"):
        similarity(a, np.zeros(3))


def test_a_generation_job_is_not_changed_by_there_being_others() -> None:
    assert GenerateJob(token_ids=[1]).features_used() == []
