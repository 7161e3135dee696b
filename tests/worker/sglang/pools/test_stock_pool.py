"""A pool whose updates go through SGLang's own group: the same verification, and the same judge of the tokens."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engines.stock_line import flip
from support.pools.pool import worker as scripted_worker
from support.pools.worker_process import WorkerProcess
from test_pool import assert_greedy, greedy, model_dir, publish, redis_url, versions  # noqa: F401 – fixtures

from rolloutmq import BlockingRolloutClient, WeightPublisher
from rolloutmq.messages import WeightSyncError
from rolloutmq.sync.publish import stock
from rolloutmq.sync.wire import broadcaster

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def worker(model_dir: Path, redis_url: str) -> Iterator[WorkerProcess]:  # noqa: F811
    started = WorkerProcess(model_dir, redis_url, model_dir.parent / "stock.log", "--dtype", "bfloat16", "--drain", "5")
    try:
        started.wait_joined()
        yield started
    finally:
        started.kill()


@pytest.fixture(scope="module")
def publisher(redis_url: str) -> Iterator[WeightPublisher]:  # noqa: F811
    with WeightPublisher(redis_url, transfer="stock", bucket_bytes=100_000, transfer_timeout_s=10.0) as publisher:
        yield publisher


def check(redis_url: str, versions: dict[int, Any], version: int) -> None:  # noqa: F811
    with BlockingRolloutClient(redis_url) as client:
        results = client.wait(client.submit(greedy(40, n=4)), 60)
    assert [result.versions for result in results] == [(version,)] * 4
    for result in results:
        assert_greedy(result, versions)


def sent(publisher: WeightPublisher, version: int, tensors: dict[str, torch.Tensor]) -> Any:
    return publisher.publish(version, tensors).wait(60)


def as_sent(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}


def test_greedy_tokens_equal_transformers_after_each_of_two_updates(
    worker: WorkerProcess,
    redis_url: str,  # noqa: F811
    versions: dict[int, Any],  # noqa: F811
    publisher: WeightPublisher,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    groups: list[str] = []

    class Counted(stock.StockGroup):
        def __init__(self, store: Any, name: str, **how: Any) -> None:
            groups.append(name)
            super().__init__(store, name, **how)

    monkeypatch.setattr(broadcaster, "StockGroup", Counted)
    for version in (1, 2):
        publish(publisher, version, versions, expect=1)
        check(redis_url, versions, version)
    assert len(groups) == 1  # it stays


def test_names_that_are_not_the_models_are_refused_before_anything_is_written(
    worker: WorkerProcess,
    redis_url: str,  # noqa: F811
    versions: dict[int, Any],  # noqa: F811
    publisher: WeightPublisher,
) -> None:
    tensors = as_sent(versions[1])
    del tensors["model.layers.1.mlp.down_proj.weight"]
    report = sent(publisher, 3, tensors)
    assert report.state == "failed"
    assert "model.layers.1.mlp.down_proj.weight" in report.failures[worker.worker_id]
    check(redis_url, versions, 2)


def test_bytes_that_change_on_the_way_are_refused_by_the_tensors_name(
    worker: WorkerProcess,
    redis_url: str,  # noqa: F811
    versions: dict[int, Any],  # noqa: F811
    publisher: WeightPublisher,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One bit of one tensor; the worker serves nothing before a whole version has come."""
    victim, honest = "model.layers.1.self_attn.k_proj.weight", stock.buffers_of

    def damaged(lot: stock.Lot, *, bucketed: bool) -> list[torch.Tensor]:
        buffers = honest(lot, bucketed=bucketed)
        flip(buffers, lot, victim)
        return buffers

    monkeypatch.setattr(stock, "buffers_of", damaged)
    report = sent(publisher, 4, as_sent(versions[1]))
    assert report.state == "failed"
    why = report.failures[worker.worker_id]
    assert why.startswith(f"verify: DigestMismatch: tensor {victim}: ")
    monkeypatch.undo()
    versions[5] = versions[1]
    publish(publisher, 5, versions, expect=1)
    check(redis_url, versions, 5)


async def test_who_refuses_is_left_out_and_the_others_are_not_touched_before(
    worker: WorkerProcess,
    redis_url: str,  # noqa: F811
    versions: dict[int, Any],  # noqa: F811
    publisher: WeightPublisher,
) -> None:
    """An engine without such a group is in the roster; SGLang would wait for it in the group and never come back."""
    versions[6] = versions[2]
    async with scripted_worker(redis_url) as other:
        report = await asyncio.to_thread(sent, publisher, 6, as_sent(versions[6]))
    assert (report.state, report.workers) == ("committed", (worker.worker_id,))
    assert "transfer='own'" in report.failures[other.id]
    await asyncio.to_thread(check, redis_url, versions, 6)
    assert restarts(redis_url) == 0


def restarts(redis_url: str) -> int:  # noqa: F811
    with BlockingRolloutClient(redis_url) as client:
        return sum(status.engine_restarts for status in client.workers())


def test_a_sender_that_says_nothing_any_more_costs_the_engine_and_the_next_one_gets_the_version(
    worker: WorkerProcess,
    redis_url: str,  # noqa: F811
    versions: dict[int, Any],  # noqa: F811
    publisher: WeightPublisher,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There is no way out of SGLang's broadcast but its processes' end."""
    silent = threading.Event()

    def send_nothing(*_: Any) -> None:
        assert silent.wait(60)
        raise WeightSyncError("the group is of no use any more")

    honest = stock.StockGroup.send_snapshot
    monkeypatch.setattr(stock.StockGroup, "send_snapshot", send_nothing)
    versions[7] = versions[1]
    handle = publisher.publish(7, as_sent(versions[7]))
    worker.wait_text("the engine died; restarting it")
    monkeypatch.setattr(stock.StockGroup, "send_snapshot", honest)
    silent.set()
    assert handle.wait(60).state == "failed"
    check(redis_url, versions, 6)  # nobody has 7: the engine gets back what was committed before
    versions[8] = versions[1]
    assert publisher.publish(8, as_sent(versions[8])).wait(60).state == "committed"
    check(redis_url, versions, 8)
    assert restarts(redis_url) == 1
