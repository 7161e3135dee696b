"""A job that nobody in the pool can run is refused where it is submitted, by name."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from support.pools.pool import eventually, status
from support.specimens.messages import job

from rolloutmq.messages import Broker, Lease, LogprobOptions, SamplingParams
from rolloutmq.messages.errors import FeatureUnavailable
from rolloutmq.messages.model.jobs import FEATURES
from rolloutmq.producer.inbox import features
from rolloutmq.producer.inbox.features import FeatureCheck

Joined = Callable[..., Awaitable[Lease]]
STOPS = SamplingParams(stop=("</answer>",))


async def joins(broker: Broker, worker: str, *has: str, engine: str = "sglang 0.5.17") -> None:
    await Lease(broker.redis, "default", worker).join(status(worker, engine=engine, features=has))


async def test_what_nobody_can_do_is_refused_with_field_value_and_engines(broker: Broker) -> None:
    await joins(broker, "a", "seed")
    await joins(broker, "b", engine="sglang 0.5.23")
    with pytest.raises(FeatureUnavailable) as refused:
        await FeatureCheck(broker).check([job(), job(sampling=STOPS)])
    assert refused.value.field == "sampling.stop"
    assert refused.value.value == ("</answer>",)
    assert "sglang 0.5.17, sglang 0.5.23" in str(refused.value)


async def test_one_worker_that_can_is_enough(broker: Broker) -> None:
    await joins(broker, "a")
    await joins(broker, "b", "sampling.stop", "seed")
    check = FeatureCheck(broker)
    await check.check([job(sampling=STOPS, seed=1)])
    with pytest.raises(FeatureUnavailable, match=r"logprobs\.top=2") as refused:
        await check.check([job(sampling=STOPS, logprobs=LogprobOptions(top=2))])
    assert refused.value.field == "logprobs.top"


async def test_all_that_a_job_uses_must_be_on_one_worker(broker: Broker) -> None:
    await joins(broker, "a", "seed")
    await joins(broker, "b", "sampling.stop")
    with pytest.raises(FeatureUnavailable):
        await FeatureCheck(broker).check([job(sampling=STOPS, seed=1)])


async def test_an_empty_pool_refuses_nothing(broker: Broker) -> None:
    await FeatureCheck(broker).check([job(sampling=STOPS, seed=1)])


async def test_plain_jobs_never_ask_redis(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    async def asked() -> Any:
        raise AssertionError("asked")

    monkeypatch.setattr(broker, "workers", asked)
    plain = job(sampling=SamplingParams(temperature=0.5, stop_token_ids=(7,)), logprobs=LogprobOptions(sampled=False))
    assert plain.features_used() == []
    await FeatureCheck(broker).check([plain])
    with pytest.raises(AssertionError, match="asked"):
        await FeatureCheck(broker).check([job(seed=0)])


async def test_a_worker_that_joins_later_counts(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "FRESH_S", 0.05)
    await joins(broker, "a")
    check = FeatureCheck(broker)
    with pytest.raises(FeatureUnavailable):
        await check.check([job(seed=1)])
    await joins(broker, "b", "seed")

    async def accepted() -> bool:
        try:
            await check.check([job(seed=1)])
        except FeatureUnavailable:
            return False
        return True

    await eventually(accepted)


async def test_what_workers_have_is_read_again_only_when_one_has_come_or_gone(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(features, "FRESH_S", 0.0)
    read: list[int] = []
    really = broker.workers

    async def watched() -> Any:
        read.append(1)
        return await really()

    monkeypatch.setattr(broker, "workers", watched)
    check = FeatureCheck(broker)
    lease = Lease(broker.redis, "default", "b")
    await joins(broker, "a", "seed")
    for _ in range(5):
        await check.check([job(seed=1)])
    assert len(read) == 1
    await lease.join(status("b"))
    for _ in range(3):
        await check.check([job(seed=1)])
        await lease.heartbeat(status("b"))
    assert len(read) == 2
    await Lease(broker.redis, "default", "a").leave()
    for _ in range(3):
        with pytest.raises(FeatureUnavailable):
            await check.check([job(seed=1)])
    assert len(read) == 3


def test_every_feature_names_a_field() -> None:
    plain = job()
    for name in FEATURES:
        plain.value_of(name)
