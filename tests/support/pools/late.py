"""What tests of late joiners share: trainers that come and go, workers, and what a pool looks like."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import torch
from support.peers.publishing import publisher as any_publisher
from support.peers.publishing import weights
from support.pools.pool import Running, wait_replies
from support.specimens.messages import job

from rolloutmq import WeightPublisher
from rolloutmq.messages import RolloutResult, SamplingParams, connect
from rolloutmq.messages.broker import broker_of
from rolloutmq.sync.transfer.ledger import Ledger
from rolloutmq.worker.scripted.engine import ScriptedEngine

publisher = partial(any_publisher, bucket_bytes=2048)


async def publish(source: WeightPublisher, version: int) -> Any:
    handle = source.publish(version, weights(version).items())
    return await asyncio.to_thread(handle.wait, 60)


async def publish_and_leave(url: str, *versions: int, **settings: Any) -> None:
    """A trainer that is gone afterwards."""
    async with publisher(url, **settings) as source:
        for version in versions:
            assert (await publish(source, version)).state == "committed"


def version_of(running: Running) -> int:
    return running.generation.version


def check_equal(engine: ScriptedEngine, version: int) -> None:
    sent = weights(version)
    assert engine.weights.keys() == sent.keys()
    for name, tensor in sent.items():
        assert torch.equal(engine.weights[name], tensor), name


async def serve(url: str, count: int, before: int = 0) -> set[tuple[int, ...]]:
    """Versions of `count` samples."""
    async with connect(url, pool="default") as client:
        broker, jobs = (
            broker_of(client, "default"),
            [job(sampling=SamplingParams(max_new_tokens=3)) for _ in range(count)],
        )
        await broker.enqueue(jobs)
        ids = {one.id for one in jobs}
        found = [it.outcome for it in await wait_replies(broker, before + count) if it.outcome.job_id in ids]
    assert all(isinstance(one, RolloutResult) for one in found)
    return {one.versions for one in found}  # type: ignore[union-attr]


async def is_waiting(ledger: Ledger, running: Running) -> bool:
    """Whether it lacks the committed version, and serves nothing."""
    return version_of(running) < await ledger.committed() and running.status.state == "syncing"
