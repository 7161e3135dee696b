"""A trainer in the test's own process, and what it publishes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import torch
from support.pools.pool import check_scripted, wait_replies
from support.specimens.messages import job

from rolloutmq import WeightPublisher
from rolloutmq.messages import Broker, SamplingParams
from rolloutmq.sync.receive.state import warm_up
from rolloutmq.sync.transfer.ledger import Ledger

WEIGHTS = {"first": torch.arange(10.0), "second": torch.ones(5, dtype=torch.int8), "third": torch.zeros(3)}


@asynccontextmanager
async def publisher(url: str, **settings: Any) -> AsyncIterator[WeightPublisher]:
    """A trainer's publisher, made and closed beside the event loop.

    A test that waits for somebody in vain says for how long; by default a busy machine has the time it needs.
    """
    await asyncio.to_thread(warm_up, torch.device("cpu"))  # it takes seconds once, and is no part of a transfer's time
    made = await asyncio.to_thread(
        lambda: WeightPublisher(url, **({"join_timeout_s": 30.0, "transfer_timeout_s": 30.0} | settings))
    )
    try:
        yield made
    finally:
        await asyncio.to_thread(made.close)


async def publish(source: WeightPublisher, version: int) -> Any:
    handle = source.publish(version, WEIGHTS.items())
    return await asyncio.to_thread(handle.wait, 60)


async def serve_some(ledger: Ledger, before: int, version: int) -> None:
    """One more job, answered with this version."""
    broker = Broker(ledger.redis, "default")
    # Of two workers the one that has it: "committed" is said when the first one serves it.
    await broker.enqueue([job(sampling=SamplingParams(max_new_tokens=4), min_version=version)])
    found = (await wait_replies(broker, before + 1))[-1].outcome
    assert found.versions == (version,)
    check_scripted(found, 3)


def weights(version: int) -> dict[str, torch.Tensor]:
    """One tensor of each kind, other values for every version."""
    base = torch.Generator().manual_seed(version)
    return {
        "bf16": torch.randn(50, 30, generator=base).to(torch.bfloat16),
        "fp32": torch.randn(70, generator=base),
        "int8": torch.randint(-100, 100, (33,), dtype=torch.int8, generator=base),
        "none": torch.empty(0, 4),
        "scalar": torch.tensor(float(version)),
        "turned": torch.randn(40, 60, generator=base).t(),
        "strided": torch.randn(20, 20, generator=base)[::3, ::2],
    }
