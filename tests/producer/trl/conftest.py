"""A pool of two real workers for TRL's trainers; the model's lm_head is tied to its embeddings."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
from support.pools.worker_process import WorkerProcess

from rolloutmq.ops.redis.embedded import EmbeddedRedis
from rolloutmq.ops.tiny_model import write_tiny_model

OPTIONS = ("--dtype", "float32", "--max-running", "32", "--cpu-threads", "1")


@pytest.fixture(scope="package", autouse=True)
def prepared() -> None:
    """transformers is imported after its preparation."""
    import_module("support.trainers.trl")


@pytest.fixture(scope="package")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trl") / "model"
    write_tiny_model(path, context=1024, width=64, tied=True)
    return path


@pytest.fixture(scope="package")
def trl_redis() -> Iterator[str]:
    with EmbeddedRedis() as server:
        yield server.url


@pytest.fixture(scope="package")
def trl_worker(tiny: Path, trl_redis: str) -> Iterator[WorkerProcess]:
    """One worker for all tests of the folder."""
    process = WorkerProcess(tiny, trl_redis, tiny.parent / "worker.log", *OPTIONS)
    try:
        process.wait_joined()
        yield process
    finally:
        process.kill()


@pytest.fixture
def second_worker(tiny: Path, trl_redis: str, trl_worker: WorkerProcess) -> Iterator[WorkerProcess]:
    """Another one, to be killed."""
    process = WorkerProcess(tiny, trl_redis, tiny.parent / "second.log", *OPTIONS)
    try:
        process.wait_joined()
        yield process
    finally:
        process.kill()
