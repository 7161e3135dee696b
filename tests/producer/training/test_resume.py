"""A trainer that crashes and is restored: no sample is trained twice in one line of weights, and none is skipped.

Each trainer's weights here are the list of the samples it was trained on. They are in its checkpoint, as real weights
are. So the tests count for themselves, and compare the books with that.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from support.pools import killed_trainer
from support.pools.clients import close_unacknowledged, streams
from support.pools.feeds import prompts
from support.pools.pool import eventually, stream_length, worker
from support.specimens.messages import SHORT

from rolloutmq import GenerateJob, InvalidField, RolloutClient, Staleness
from rolloutmq.messages import Broker
from rolloutmq.producer.training import GroupRules, RolloutFeed, TrainGroup
from rolloutmq.worker.scripted.engine import ScriptedEngine

RULE = Staleness(eta=1, batch_size=4, on_stale="mark")
"""Nobody publishes in these tests: all samples are of version 0."""


class Trainer:
    """A trainer of one process. weights: (prompt's place, sample, its job) of each sample it was trained on."""

    def __init__(self, url: str, rules: GroupRules | None = None) -> None:
        self.client = RolloutClient(url, client_id="client")
        self.feed = self.client.feed(RULE, rules or GroupRules())
        self.weights: list[tuple[int, int, str]] = []

    def checkpoint(self) -> str:
        """As it is on disk; `saved` is another call."""
        return json.dumps({"weights": self.weights, "feed": self.feed.state_dict(), "version": self.feed.books.version})

    def restore(self, checkpoint: str) -> None:
        read = json.loads(checkpoint)
        self.weights = [tuple(it) for it in read["weights"]]
        self.feed.load_state_dict(read["feed"])

    def batches(self, count: int = 12, **fields: Any) -> Any:
        return self.feed.batches(islice(prompts(count, **fields), self.feed.books.numbers, None), timeout=20)

    def step(self, batch: list[TrainGroup]) -> None:
        for group in batch:
            for sample, result in zip(group.samples, group.results, strict=True):
                self.weights.append((group.metadata["place"], sample, result.job_id))
        self.feed.train(batch)
        self.feed.advance(self.feed.books.version + 1)

    async def flushed(self) -> None:
        """What may be acknowledged is acknowledged."""
        await eventually(lambda: not any(stream._acks for stream in streams(self.client)))

    async def crash(self) -> None:
        """Nothing more reaches Redis."""
        await close_unacknowledged(self.client)

    def agrees(self) -> None:
        """The books say what the weights are."""
        books = self.feed.books
        books.check()
        assert books.trained == len(self.weights)
        assert len({it[:2] for it in self.weights}) == len(self.weights), "a sample was trained twice"
        for place, sample, _ in self.weights:
            assert books.fate(place, sample).startswith("trained")


async def finish(trainer: Trainer, count: int = 12) -> None:
    async for batch in trainer.batches(count):
        trainer.step(batch)
        trainer.agrees()
    assert sorted(it[:2] for it in trainer.weights) == [(place, sample) for place in range(count) for sample in (0, 1)]
    assert trainer.feed.books.in_flight == 0


@pytest.fixture
async def trainer(redis_db: str) -> Any:
    """Makes trainers; closes those that have not crashed."""
    made: list[Trainer] = []

    def make(rules: GroupRules | None = None) -> Trainer:
        made.append(Trainer(redis_db, rules))
        return made[-1]

    yield make
    for one in made:
        await one.client.aclose()


Make = Callable[..., Trainer]


async def steps(trainer: Trainer, count: int) -> None:
    loop = trainer.batches()
    for _ in range(count):
        trainer.step(await anext(loop))
        trainer.agrees()


async def test_a_crash_between_step_and_checkpoint(trainer: Make, serving: None) -> None:
    """What was trained after the checkpoint comes again, because the weights that it trained are gone."""
    first = trainer()
    await steps(first, 1)
    saved = first.checkpoint()
    first.feed.saved()
    await steps(first, 2)
    lost = set(first.weights[4:])
    assert len(lost) == 8
    await first.flushed()
    await first.crash()
    second = trainer()
    second.restore(saved)
    assert len(second.weights) == 4
    await finish(second)
    assert lost <= set(second.weights), "the very samples that were there, not new ones"


async def test_a_crash_after_the_checkpoint_before_the_acknowledgement(
    trainer: Make, serving: None, db: Redis, broker: Broker
) -> None:
    """What the checkpoint has as trained is still on the stream. It is acknowledged, and not trained again."""
    first = trainer()
    await steps(first, 1)
    first.checkpoint()
    await steps(first, 2)
    saved = first.checkpoint()
    await first.flushed()
    assert await stream_length(db, broker) >= 8, "kept until a checkpoint is saved"
    await first.crash()
    second = trainer()
    second.restore(saved)
    assert len(second.weights) == 12
    await finish(second)
    second.checkpoint()
    second.feed.saved()
    await eventually(lambda: acknowledged(db, broker), what="nothing is left on the stream")


async def acknowledged(db: Redis, broker: Broker) -> bool:
    return await stream_length(db, broker) == 0


@pytest.mark.parametrize("on_failed", ["ask", "less"])
async def test_an_older_checkpoint(trainer: Make, serving: None, on_failed: Any) -> None:
    """What a later checkpoint let go is not in the pool any more. It is generated again, and nothing is skipped.

    It has not failed, so it does not matter what becomes of samples that failed.
    """
    rules = GroupRules(on_failed=on_failed, retries=0)
    first = trainer(rules)
    await steps(first, 1)
    old = first.checkpoint()
    first.feed.saved()
    await steps(first, 3)
    first.checkpoint()
    first.feed.saved()
    await first.client.aclose()
    second = trainer(rules)
    second.restore(old)
    gone = {it for it in first.weights if it not in second.weights}
    await finish(second)
    assert second.feed.books.marks["asked again"] > 0
    assert not gone & set(second.weights), "other jobs: the first ones have ended for good"


async def test_a_crash_before_the_first_checkpoint(trainer: Make, serving: None) -> None:
    """The trainer begins again. What it had trained on was acknowledged and is generated again."""
    first = trainer()
    await steps(first, 2)
    await first.client.aclose()
    await finish(trainer())


async def test_a_buffered_sample_is_not_skipped(trainer: Make, serving: None) -> None:
    """Groups that the trainer had taken, or that were ready for it, and no step had used."""
    first = trainer()
    loop = first.batches()
    await anext(loop)
    saved = first.checkpoint()
    first.feed.saved()
    ready = {result.job_id for group in await anext(loop) for result in group.results}
    assert ready
    await first.crash()
    second = trainer()
    second.restore(saved)
    await finish(second)
    assert ready <= {job_id for *_, job_id in second.weights}


async def test_a_sample_that_was_dropped_stays_dropped(trainer: Make, serving: None) -> None:
    """Its group's other sample was ready when the trainer died; both are still on the stream."""
    rules = GroupRules(keep=lambda result: result.sample == 0)
    first = trainer(rules)
    await first.feed.submit(next(prompts()), 5)
    await eventually(lambda: dropped(first.feed), what="the group is ready")
    saved = first.checkpoint()
    first.feed.saved()
    await first.crash()
    second = trainer()  # which would keep it
    second.restore(saved)
    (group,) = await second.feed.batch(20)
    assert group.samples == (0,)
    second.step([group])
    second.agrees()
    assert second.feed.report()["dropped"] == {"filtered": 1}


async def dropped(feed: RolloutFeed) -> int:
    await feed._pool.pump()
    return feed.books.dropped.total()


async def test_partials_go_on(redis_db: str, trainer: Make, db: Redis, broker: Broker) -> None:
    """A job that is under way when the trainer dies goes on with the same attempt: nothing is generated twice."""
    long = {"sampling": {"max_new_tokens": 4_000}}
    async with worker(redis_db, engine=ScriptedEngine(tokens_per_s=8_000.0), max_running=8):
        first = trainer()
        for job in prompts(2, **long):
            await first.feed.submit(job, 5)
        saved = first.checkpoint()
        first.feed.saved()
        await eventually(lambda: running(broker), what="the worker has the jobs")
        await first.crash()
        second = trainer()
        second.restore(saved)
        batch = await second.feed.batch(20)
        assert [result.attempt for group in batch for result in group.results] == [1] * 4
        assert second.feed.books.marks["asked again"] == 0


async def running(broker: Broker) -> bool:
    load = await broker.load()
    return load.open_jobs == 2 and not sum(load.queued)


async def test_other_prompts_than_before(trainer: Make, serving: None) -> None:
    """A restored trainer whose data differs gets the samples of what it asks for, and not what is in the pool."""
    first = trainer()
    saved = first.checkpoint()
    first.feed.saved()
    loop = first.batches()
    await anext(loop)
    await first.crash()
    second = trainer()
    second.restore(saved)
    async for batch in second.feed.batches(prompts(4, token_ids=[9, 9]), timeout=20):
        second.step(batch)
        assert all(group.prompt_ids.tolist() == [9, 9] for group in batch)
    second.agrees()
    assert second.feed.books.trained == 8
    assert second.client.outstanding == 0, "what the first one asked for is given up"


async def test_what_failed_before_a_crash_fails_again_or_comes(trainer: Make, redis_db: str) -> None:
    """A prompt with a retry under way: the books know which job is for which samples."""
    first = trainer(GroupRules(retries=1))
    await first.feed.submit(GenerateJob(text="no tokenizer", n=2, sampling=SHORT), 5)
    async with worker(redis_db):
        await eventually(lambda: asked_again(first.feed), what="the first job has failed")
        saved = first.checkpoint()
        first.feed.saved()
        await first.crash()
        second = trainer(GroupRules(retries=1))
        second.restore(saved)
        assert await second.feed.batch(20) == []
    assert second.feed.report()["dropped"] == {"failed": 2}
    second.agrees()


async def asked_again(feed: RolloutFeed) -> bool:
    await feed._pool.pump()
    return feed.books.marks["asked again"] > 0


@pytest.mark.parametrize(("seed", "deliver"), [(seed, ("groups", "samples")[seed % 2]) for seed in range(8)])
async def test_crashes_anywhere(trainer: Make, serving: None, seed: int, deliver: Any) -> None:
    """Random crashes and restored checkpoints, also old ones, until the run ends. The last line of weights is whole."""
    draw, rules = random.Random(seed), GroupRules(deliver=deliver)
    checkpoints: list[str] = []
    for _ in range(6):
        one = trainer(rules)
        if checkpoints:
            one.restore(draw.choice(checkpoints[-3:]))
        loop = one.batches()
        for _ in range(draw.randint(0, 4)):
            if (batch := await anext(loop, None)) is None:
                break
            if draw.random() < 0.2:
                break  # it dies with the batch in its hands
            one.step(batch)
            one.agrees()
            if draw.random() < 0.5:
                checkpoints.append(one.checkpoint())
                if draw.random() < 0.7:
                    one.feed.saved()
        await (one.crash() if draw.random() < 0.7 else one.client.aclose())
    last = trainer(rules)
    if checkpoints:
        last.restore(checkpoints[-1])
    await finish(last)


async def test_a_process_that_is_killed_three_times(redis_db: str, serving: None, tmp_path: Path) -> None:
    """With SIGKILL, wherever it is then, a little later each time. The last one ends by itself."""
    asked = [sys.executable, killed_trainer.__file__, redis_db, str(tmp_path / "checkpoint.json")]
    for steps_before in (2, 3, 6, None):
        process = await asyncio.create_subprocess_exec(*asked, stdout=asyncio.subprocess.PIPE)
        assert process.stdout is not None
        lines: list[str] = []
        while line := await process.stdout.readline():
            lines.append(line.decode())
            if len(lines) == steps_before:
                process.kill()
                break
        await process.wait()
    told = json.loads(lines[-1])
    everything = [
        [place, sample] for place in range(killed_trainer.PROMPTS) for sample in range(killed_trainer.SAMPLES)
    ]
    assert sorted(told["weights"]) == everything, "every sample once"
    report = told["report"]
    assert (report["accepted"], report["trained"], report["in_flight"]) == (len(everything), len(everything), 0)


@pytest.mark.parametrize(
    ("state", "field"),
    [({}, "state"), (None, "state"), ({"checkpoint": 1, "books": {}}, "state.format")],
)
async def test_what_is_no_state_is_refused(client: RolloutClient, state: Any, field: str) -> None:
    feed = client.feed(RULE)
    with pytest.raises(InvalidField) as raised:
        feed.load_state_dict(state)
    assert raised.value.field == field


async def test_a_state_is_of_its_client_and_comes_first(redis_db: str, trainer: Make, client: RolloutClient) -> None:
    first = trainer()
    await first.feed.submit(next(prompts()), 5)
    state = first.feed.state_dict()
    with pytest.raises(InvalidField, match="before the feed's first call"):
        first.feed.load_state_dict(state)
    async with RolloutClient(redis_db, client_id="another") as other:
        with pytest.raises(InvalidField, match=r"state\.client_id='client': 'another'"):
            other.feed(RULE).load_state_dict(state)
