"""A reproducible feed: the same samples in the same batches, whoever generates them and whatever happens meanwhile."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch
from support.peers.publishing import publisher
from support.pools.clients import close_unacknowledged
from support.pools.feeds import prompts
from support.pools.pool import Running, eventually, worker

from rolloutmq import GenerateJob, GroupRules, InvalidField, RolloutClient, RolloutFeed, Staleness, WeightPublisher
from rolloutmq.messages import FeatureUnavailable
from rolloutmq.producer.training import rewards_differ
from rolloutmq.worker.engine.protocol import EngineInfo
from rolloutmq.worker.scripted.engine import ScriptedEngine

RULE = Staleness(eta=2, batch_size=4, on_stale="wait")
COUNT = 40
Sample = tuple[int, int, int, tuple[int, ...], tuple[int, ...]]


class Seeded(ScriptedEngine):
    """Says that it draws by seeds. Its tokens follow from job, sample, place and version in any case."""

    @property
    def info(self) -> EngineInfo:
        found = super().info
        return replace(found, features=found.features | {"seed"})


def score(results: Any) -> list[float]:
    return [float(result.token_ids.sum() % 3) for result in results]


def rare(rewards: Any) -> bool:
    return rewards[0] == 1.0


RULES = GroupRules(score=score, teaches=rewards_differ, most_filtered=2)
STRICT = GroupRules(score=score, teaches=rare, most_filtered=9)
"""Most groups are filtered: a batch needs more prompts than the staleness lets in at first."""


class Trainer:
    """Its weights are one number, which follows from what it was trained on."""

    def __init__(self, url: str, source: WeightPublisher, rule: Staleness = RULE, rules: GroupRules = RULES) -> None:
        self.source, self.client = source, RolloutClient(url, client_id="run")
        self.feed: RolloutFeed = self.client.feed(rule, rules, reproducible=True)
        self.weight, self.batches = 0.0, list[list[Sample]]()
        self.version, self.handle, self.before = 1, None, None
        self.loop: Any = None

    def begin(self, saved: str | None = None) -> None:
        if saved is not None:
            read = json.loads(saved)
            self.weight = read["weight"]
            self.feed.load_state_dict(read["feed"])
        self.version = max(1, self.feed.books.version)
        self.feed.renumber(self.version)
        self.publish()
        jobs = islice(prompts(COUNT), self.feed.books.numbers, None)
        self.loop = self.feed.batches(jobs, timeout=60)

    def publish(self) -> None:
        tensors = {"w": torch.full((4,), self.weight)}
        handle = self.source.publish(self.version, tensors, after=self.feed.sampled(self.version))
        self.before, self.handle = self.handle, handle

    async def step(self) -> bool:
        try:
            batch = await anext(self.loop)
        except StopAsyncIteration:
            return False
        found = [
            (group.number, sample, result.segments[0].version, tuple(result.versions), tuple(result.token_ids.tolist()))
            for group in batch
            for sample, result in zip(group.samples, group.results, strict=True)
        ]
        self.batches.append(found)
        self.weight = (self.weight * 3 + sum(sum(it[4]) for it in found)) % 9973
        self.feed.train(batch)
        self.version += 1
        self.publish()
        self.feed.advance(self.version)
        self.feed.books.check()
        return True

    async def checkpoint(self) -> str:
        if self.before is not None:
            await asyncio.to_thread(self.before.wait, 60, for_="committed")
        return json.dumps({"weight": self.weight, "feed": self.feed.state_dict()})


async def run(
    url: str, speeds: tuple[float | None, ...], *, death: int | None = None, rules: GroupRules = RULES
) -> tuple[list[Any], float]:
    """A whole run on workers of these speeds; before batch `death` the first one dies."""
    async with AsyncExitStack() as stack:
        first, *_ = [
            await stack.enter_async_context(worker(url, engine=Seeded(speed), max_running=4, checkpoint_s=0.1))
            for speed in speeds
        ]
        source = await stack.enter_async_context(publisher(url))
        trainer = Trainer(url, source, rules=rules)
        async with trainer.client:
            trainer.begin()
            while await trainer.step():
                if len(trainer.batches) == death:
                    await first.die()
        return trainer.batches, trainer.weight


@pytest.mark.parametrize("rules", [RULES, STRICT])
async def test_batches_do_not_depend_on_the_workers(redis_db: str, redis_url: str, rules: GroupRules) -> None:
    once, weight = await run(redis_db, (None,), rules=rules)
    again = await run(redis_url, (400.0, 150.0, 900.0), death=3, rules=rules)
    assert again == (once, weight)
    assert {len(batch) for batch in once[:-1]} == {RULE.batch_size}
    assert len(once) > 4
    order = [sample[:2] for batch in once for sample in batch]
    assert order == sorted(order)
    assert len({number for number, _ in order}) < COUNT, "none was filtered"
    for step, batch in enumerate(once):
        for _, _, version, versions, _ in batch:
            assert versions == (version,)
            assert max(1, step + 1 - RULE.eta) <= version <= step + 1


async def test_without_a_filter_batch_k_is_sampled_by_version_k_minus_eta(redis_db: str) -> None:
    async with worker(redis_db, engine=Seeded()), publisher(redis_db) as source:
        trainer = Trainer(redis_db, source, rules=GroupRules())
        async with trainer.client:
            trainer.begin()
            while await trainer.step():
                pass
    found = [{version for _, _, version, _, _ in batch} for batch in trainer.batches]
    assert found == [{max(1, step + 1 - RULE.eta)} for step in range(COUNT // 2)]


@pytest.mark.parametrize("killed_after", [0, 1, 3])
async def test_a_trainer_that_was_killed_repeats_itself(redis_db: str, redis_url: str, killed_after: int) -> None:
    """Steps behind its checkpoint come again, under the same numbers, and are the same."""
    expected, weight = await run(redis_url, (None,))
    async with worker(redis_db, engine=Seeded(800.0)) as running:
        async with publisher(redis_db) as source:
            first = Trainer(redis_db, source)
            first.begin()
            saved = await first.checkpoint()
            first.feed.saved()
            for _ in range(killed_after):
                await first.step()
            if killed_after:
                saved = await first.checkpoint()
                first.feed.saved()
            for _ in range(2):
                await first.step()
            await close_unacknowledged(first.client)
        async with publisher(redis_db) as source:
            second = Trainer(redis_db, source)
            async with second.client:
                second.begin(saved)
                assert second.version == killed_after + 1
                while await second.step():
                    pass
                await asyncio.to_thread(second.handle.committed, 60)  # type: ignore[attr-defined]
        assert (first.batches[:killed_after] + second.batches, second.weight) == (expected, weight)
        assert first.batches[killed_after:] == second.batches[:2]
        assert running.generation.version == second.version


async def test_a_worker_that_comes_late_gets_what_a_restored_trainer_has(redis_db: str) -> None:
    """Its trainer and all workers were lost, so the pool knows the version and nobody has it."""
    async with worker(redis_db, engine=Seeded()), publisher(redis_db) as source:
        first = Trainer(redis_db, source)
        first.begin()
        saved = await first.checkpoint()
        await first.step()
        await asyncio.to_thread(first.before.wait, 60)  # type: ignore[attr-defined]
        await close_unacknowledged(first.client)
    async with worker(redis_db, engine=Seeded()) as late, publisher(redis_db) as source:
        second = Trainer(redis_db, source)
        async with second.client:
            second.begin(saved)
            await second.step()
            await second.step()
        assert second.batches[0] == first.batches[0]
        await eventually(lambda: _has(late, 2))


def _has(running: Running, version: int) -> bool:
    return running.generation.version >= version


async def test_another_trainer_does_not_take_its_numbers(redis_db: str) -> None:
    """What it computes is something else, so it is told."""
    async with worker(redis_db, engine=Seeded()), publisher(redis_db) as source:
        first = Trainer(redis_db, source)
        async with first.client:
            first.begin()
            await asyncio.to_thread(first.handle.committed, 60)  # type: ignore[attr-defined]
    async with publisher(redis_db) as source, RolloutClient(redis_db) as client:
        feed = client.feed(RULE, reproducible=True)
        handle = source.publish(1, {"w": torch.full((4,), 5.0)}, after=feed.sampled(1))
        with pytest.raises(Exception, match=r"version 1: .*does not repeat their run"):
            await asyncio.to_thread(handle.wait, 60)


async def test_a_version_waits_for_what_the_one_before_has_to_sample(redis_db: str) -> None:
    """And is not superseded, however many wait. What never comes is given up with the publisher."""
    async with worker(redis_db, engine=Seeded(5.0)) as running, publisher(redis_db) as source:
        trainer = Trainer(redis_db, source, rules=GroupRules())
        async with trainer.client:
            trainer.begin()
            taking = asyncio.create_task(trainer.step())
            await eventually(lambda: running.generation.running)
            feed = trainer.feed
            waiting = [
                source.publish(version, {"w": torch.zeros(4)}, after=feed.sampled(version)) for version in (2, 3)
            ]
            assert [handle.progress().phase for handle in waiting] == ["waiting", "waiting"]
            taking.cancel()
            await asyncio.gather(taking, return_exceptions=True)
            await asyncio.to_thread(source.close)
            reports = [handle.wait(0) for handle in waiting]
    assert [report.state for report in reports] == ["aborted", "aborted"]
    assert running.generation.version == 1


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "on_stale": ({"on_stale": "drop"}, {}),
    "over_sample": ({}, {"over_sample": 1}),
    "over_sample_rate": ({}, {"over_sample_rate": 0.5}),
    "partials": ({}, {"partials": True}),
    "deliver": ({}, {"deliver": "samples"}),
    "on_failed": ({}, {"on_failed": "less"}),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_what_cannot_be_reproduced_is_refused_by_name(redis_db: str, name: str) -> None:
    rule, rules = REFUSED[name]
    async with RolloutClient(redis_db) as client:
        with pytest.raises(InvalidField, match=rf"{name}=.*in a reproducible run"):
            client.feed(replace(RULE, **rule), GroupRules(**rules), reproducible=True)


@pytest.mark.parametrize(("name", "value"), [("deadline_s", 60.0), ("max_staleness", 1), ("lora", "tutor")])
async def test_so_are_jobs_and_calls(redis_db: str, name: str, value: Any) -> None:
    async with worker(redis_db, engine=Seeded()), RolloutClient(redis_db) as client:
        feed = client.feed(RULE, reproducible=True)
        with pytest.raises(InvalidField, match=rf"{name}=.*in a reproducible run"):
            await anext(aiter(feed.batches(prompts(2, **{name: value}), timeout=20)))
        with pytest.raises(InvalidField, match="in a reproducible run"):
            await feed.submit(GenerateJob(token_ids=[1]))
        with pytest.raises(InvalidField, match=r"version=7: .*in a reproducible run"):
            feed.advance(7)


async def test_workers_have_to_be_deterministic(redis_db: str) -> None:
    async with worker(redis_db), RolloutClient(redis_db) as client:
        feed = client.feed(RULE, reproducible=True)
        with pytest.raises(FeatureUnavailable, match="seed"):
            await anext(aiter(feed.batches(prompts(2), timeout=20)))


async def test_a_checkpoint_of_another_kind_is_refused(redis_db: str) -> None:
    async with worker(redis_db, engine=Seeded(5.0)), RolloutClient(redis_db, client_id="run") as client:
        free = client.feed(replace(RULE, on_stale="mark"))
        await free.submit(GenerateJob(token_ids=[1]))
        state = free.state_dict()
    async with RolloutClient(redis_db, client_id="run") as client:
        with pytest.raises(InvalidField, match="of a reproducible run"):
            client.feed(RULE, reproducible=True).load_state_dict(state)


async def test_what_failed_is_asked_for_with_its_seed_and_then_an_error(redis_db: str) -> None:
    async with worker(redis_db, engine=Seeded(5.0)) as running, RolloutClient(redis_db, client_id="run") as client:
        feed = client.feed(replace(RULE, eta=0), GroupRules(retries=1), reproducible=True)
        loop = aiter(feed.batches(prompts(2), timeout=20))
        waiting = asyncio.create_task(anext(loop))
        await eventually(lambda: running.generation.running)
        await client.cancel_all()
        with pytest.raises(Exception, match=r"prompt \d lacks samples \[0, 1\], without which"):
            await waiting
