"""A trainer under torchrun, sharded, with a process group of its own: it publishes, and trains on as if it did not."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.peers import torchrun_trainer
from support.pools.pool import Running, check_scripted, eventually, wait_replies, worker
from support.specimens.messages import job

from rolloutmq.messages import Broker, connect
from rolloutmq.sync.transfer.ledger import Ledger


@asynccontextmanager
async def torchrun(folder: Path, url: str, *how: str) -> AsyncIterator[asyncio.subprocess.Process]:
    log = (folder / "torchrun.log").open("wb")
    started = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
        *(torchrun_trainer.__file__, str(folder), url, *how),
        stdout=log,
        stderr=log,
    )
    try:
        yield started
    except BaseException:
        print((folder / "torchrun.log").read_text(errors="replace")[-6000:])
        raise
    finally:
        if started.returncode is None:
            started.terminate()  # torchrun ends its ranks
            await started.wait()
        log.close()


async def holds(one: Running, folder: Path, version: int) -> None:
    """Every bit of the twin that was not sharded."""
    await eventually(lambda: one.generation.version == version, 60.0, f"version {version}")
    expected = torch.load(folder / f"{version}.pt")
    assert one.engine.weights.keys() == expected.keys()
    for name, tensor in expected.items():
        got = one.engine.weights[name]
        assert got.dtype == tensor.dtype
        assert torch.equal(got, tensor), name


def seen(folder: Path, rank: int) -> dict[str, Any]:
    return dict(json.loads((folder / f"{rank}.json").read_text()))


@pytest.mark.slow
async def test_both_ranks_publish_and_go_on_training(redis_db: str, tmp_path: Path) -> None:
    async with worker(redis_db) as one, torchrun(tmp_path, redis_db) as trainer:
        for version in (1, 2):
            await holds(one, tmp_path, version)
            (tmp_path / f"{version}.checked").touch()
        async with asyncio.timeout(60):
            assert await trainer.wait() == 0
    committed = {"state": "committed", "workers": [one.id], "failures": {}}
    delegated = {"state": "delegated", "workers": [], "failures": {}}
    assert seen(tmp_path, 0) == {"reports": [committed] * 2, "environment": [], "default group": True}
    assert seen(tmp_path, 1) == {"reports": [delegated] * 2, "environment": [], "default group": True}


@pytest.mark.slow
async def test_a_rank_that_dies_before_a_gather_costs_the_trainer_a_publish_and_the_pool_nothing(
    redis_db: str, tmp_path: Path
) -> None:
    """The gather is the trainer's own collective: it raises there, nothing is announced, and rank 0 can go on."""
    async with worker(redis_db) as one, torchrun(tmp_path, redis_db, "dies") as trainer:
        await holds(one, tmp_path, 1)
        (tmp_path / "1.checked").touch()
        await holds(one, tmp_path, 2)
        async with asyncio.timeout(60):
            assert await trainer.wait() != 0  # torchrun's word on a dead rank
        found = seen(tmp_path, 0)
        assert found["alone"]["error"]
        assert {**found["alone"], "error": ""} == {"error": "", "newest": 1, "state": "committed", "workers": [one.id]}
        assert not (tmp_path / "1.json").exists()
        async with connect(redis_db) as client:
            ledger, broker = Ledger(client, "default"), Broker(client, "default")
            assert (await ledger.committed(), await ledger.open_epoch()) == (2, 0)
            await broker.enqueue([job()])
            (reply,) = await wait_replies(broker, 1)
        check_scripted(reply.outcome, 3)
        assert reply.outcome.versions == (2,)
