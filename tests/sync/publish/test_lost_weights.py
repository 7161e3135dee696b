"""The committed version is nobody's any more: what is said of that, and the ways out."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from safetensors.torch import save_file
from support.peers.publishing import WEIGHTS, publish, publisher
from support.pools.pool import eventually, worker
from support.specimens.messages import tokens
from typer.testing import CliRunner

from rolloutmq import RolloutClient
from rolloutmq.messages import Broker, connect
from rolloutmq.messages.errors import WeightSyncError
from rolloutmq.ops.cli.main import app
from rolloutmq.ops.weights_ledger import reset_weights
from rolloutmq.producer.control import PoolControl
from rolloutmq.producer.diagnosis import read_pool, reasons
from rolloutmq.sync.transfer import Ledger, VersionHolder


async def lose(url: str, *, killed: bool = False) -> None:
    """A trainer publishes version 3 and ends, and so does the worker that had it."""
    async with worker(url), publisher(url) as trainer:
        assert (await publish(trainer, 3)).state == "committed"
    if killed:  # then its entry stays
        async with connect(url, pool="default") as db:
            ledger = Ledger(db, "default")
            await db.hset(ledger.keys.holders, "", VersionHolder(3, "127.0.0.1:9", "secret").to_json())


async def causes(url: str) -> list[str]:
    async with connect(url, pool="default") as db:
        return [reason.cause for reason in reasons(await read_pool(Broker(db, "default")))]


@pytest.mark.parametrize("killed", [False, True])
async def test_it_is_told_and_reset_lets_workers_serve_their_checkpoint(redis_db: str, killed: bool) -> None:
    await lose(redis_db, killed=killed)
    async with worker(redis_db), RolloutClient(redis_db) as client:
        handle = await client.submit(tokens())

        async def lost() -> bool:
            return (await causes(redis_db))[:1] == ["weights-lost"]

        await eventually(lost)
        told = await asyncio.to_thread(CliRunner().invoke, app, ["weights", "reset", "--redis", redis_db, "--yes"])
        assert told.exit_code == 0, told.output
        assert "the next one to publish is 4 or higher" in told.output
        (result,) = await client.wait(handle, 30)
        assert result.versions == (0,)
        assert "weights-lost" not in await causes(redis_db)
        async with publisher(redis_db) as trainer:
            assert trainer.last_version == 3
            assert (await publish(trainer, 4)).state == "committed"


async def test_a_trainer_that_publishes_is_a_way_out(redis_db: str) -> None:
    await lose(redis_db)
    async with worker(redis_db), RolloutClient(redis_db) as client, publisher(redis_db) as trainer:
        handle = await client.submit(tokens())
        assert (await publish(trainer, trainer.last_version + 1)).state == "committed"
        assert (await client.wait(handle, 30))[0].versions == (4,)


async def test_a_snapshot_is_a_way_out(redis_db: str, tmp_path: Path) -> None:
    async with worker(redis_db), publisher(redis_db, snapshots=tmp_path, snapshot_every=5) as trainer:
        for version in (1, 2):
            assert (await publish(trainer, version)).state == "committed"
    async with worker(redis_db, snapshots=str(tmp_path)), RolloutClient(redis_db) as client:
        assert (await client.wait(await client.submit(tokens()), 30))[0].versions == (2,)


async def test_weights_that_were_loaded_by_command_are_served(redis_db: str, tmp_path: Path) -> None:
    await lose(redis_db)
    save_file(dict(WEIGHTS), tmp_path / "model.safetensors")
    async with worker(redis_db), RolloutClient(redis_db) as client, PoolControl(redis_db) as control:
        handle = await client.submit(tokens())
        (answer,) = (await control.load(str(tmp_path), 100)).check().values()
        assert answer.result["state"] == "serving"
        assert (await client.wait(handle, 30))[0].versions == (100,)


async def test_a_load_by_command_says_why_its_worker_does_not_serve(redis_db: str, tmp_path: Path) -> None:
    save_file(dict(WEIGHTS), tmp_path / "model.safetensors")
    async with worker(redis_db), PoolControl(redis_db) as control:
        await control.pause()
        (answer,) = (await control.load(str(tmp_path), 100)).check().values()
        assert answer.result["state"] == "paused"


async def test_reset_is_refused_while_somebody_has_the_version(redis_db: str) -> None:
    with pytest.raises(WeightSyncError, match="no version yet"):
        await reset_weights(redis_db, "default")
    async with publisher(redis_db) as trainer:
        async with worker(redis_db) as running:
            assert (await publish(trainer, 1)).state == "committed"
            with pytest.raises(WeightSyncError, match=f"not lost: {running.id} has it"):
                await reset_weights(redis_db, "default")
        with pytest.raises(WeightSyncError, match=r"a publisher is there, at .* port \d+"):
            await reset_weights(redis_db, "default")
    assert await reset_weights(redis_db, "default") == 1


async def test_a_later_trainers_offer_stays_when_an_earlier_one_ends(redis_db: str) -> None:
    async with worker(redis_db), publisher(redis_db) as second:
        async with publisher(redis_db) as first:
            assert (await publish(first, 1)).state == "committed"
            assert (await publish(second, 2)).state == "committed"
        async with connect(redis_db, pool="default") as db:
            offer, _ = await Ledger(db, "default").holders(2)
            assert offer is not None
