"""A worker that comes when the trainer is gone catches up from one that serves: real SGLang on both sides."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.pools.worker_process import WorkerProcess

from rolloutmq import BlockingRolloutClient, GenerateJob, RolloutResult, SamplingParams, WeightPublisher
from rolloutmq.ops.redis.embedded import EmbeddedRedis
from rolloutmq.ops.tiny_model import write_tiny_model
from rolloutmq.worker.cpu_support import prepare_transformers

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(300)]
OPTIONS = ("--dtype", "float32", "--max-running", "8", "--drain", "5", "--log-level", "info")
PROMPTS = [list(range(5 + i, 40 + i)) for i in range(4)]


@pytest.fixture
def redis_url() -> Iterator[str]:
    with EmbeddedRedis() as server:
        yield server.url


@pytest.fixture
def started() -> Iterator[list[WorkerProcess]]:
    """Workers that a test starts; they end with it."""
    workers: list[WorkerProcess] = []
    yield workers
    for worker in workers:
        worker.kill()


def new_weights(model_dir: Path) -> dict[str, Any]:
    """All of the checkpoint's tensors, changed so much that every greedy token is another."""
    prepare_transformers()
    import torch  # noqa: PLC0415
    from safetensors.torch import load_file  # noqa: PLC0415

    torch.manual_seed(1)
    tensors = load_file(model_dir / "model.safetensors")
    return {
        name: (tensor + 0.5 * tensor.std().nan_to_num(1.0) * torch.randn(tensor.shape))
        for name, tensor in tensors.items()
    }


def greedy(client: BlockingRolloutClient) -> list[RolloutResult]:
    sampling = SamplingParams(max_new_tokens=24, temperature=0.0, ignore_eos=True)
    # One at a time: in batches of different shapes two almost equal tokens can change places.
    return [client.wait(client.submit(GenerateJob(token_ids=prompt, sampling=sampling)), 60)[0] for prompt in PROMPTS]


def states(client: BlockingRolloutClient) -> dict[str, tuple[int, str]]:
    return {worker.worker_id: (worker.version, worker.state) for worker in client.workers()}


@pytest.mark.parametrize(("source", "begins"), [("peer", "checkpoint"), ("snapshot", "checkpoint"), ("peer", "newest")])
def test_the_late_ones_greedy_tokens_are_the_first_ones(
    redis_url: str, tmp_path: Path, started: list[WorkerProcess], source: str, begins: str
) -> None:
    model_dir, folder = tmp_path / "model", tmp_path / "snapshots"
    write_tiny_model(model_dir, context=1024, dtype="float32")
    options = (*OPTIONS, "--snapshots", str(folder))
    started.append(WorkerProcess(model_dir, redis_url, tmp_path / "first.log", *options))
    first = started[0]
    first.wait_joined()
    with BlockingRolloutClient(redis_url) as client:
        before = greedy(client)
        with WeightPublisher(redis_url, snapshots=folder if source == "snapshot" else None) as publisher:
            report = publisher.publish(1, new_weights(model_dir)).wait(60)
            assert (report.state, report.failures) == ("committed", {})
        expected = greedy(client)
        if source == "snapshot":
            first.kill()  # nobody else has it
        started.append(WorkerProcess(model_dir, redis_url, tmp_path / "late.log", *options, "--first-weights", begins))
        late = started[1]
        late.wait_joined()
        while states(client).get(late.worker_id) != (1, "serving"):
            assert late.process.poll() is None
        if source == "peer":
            assert "version 1 came from others" in late.text()
            assert states(client)[first.worker_id] == (1, "serving")
            first.kill()
        else:
            assert f"version 1 came from {folder}" in late.text()
        assert ("the checkpoint was not read" in late.text()) == (begins == "newest")
        after = greedy(client)
    for old, known, now in zip(before, expected, after, strict=True):
        assert (old.versions, known.versions, now.versions) == ((0,), (1,), (1,))
        np.testing.assert_array_equal(known.token_ids, now.token_ids)
        assert (old.token_ids != now.token_ids).any()
