"""A publish that raises leaves nothing behind: not in the trainer's store, and not as a version to be sent later."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from support.peers.publishing import publish, publisher
from support.pools.pool import eventually, worker
from support.specimens import adapters

from rolloutmq.messages import WeightSyncError, connect
from rolloutmq.sync.publish.sender import Sender
from rolloutmq.sync.transfer.ledger import Ledger
from rolloutmq.sync.transfer.order import TransferOrder, TransferReport
from rolloutmq.worker.scripted.engine import ScriptedEngine


@pytest.fixture
async def ledger(redis_db: str) -> AsyncIterator[Ledger]:
    async with connect(redis_db) as client:
        yield Ledger(client, "default")


def failing(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """This call of the ledger raises, until `monkeypatch.undo`."""

    async def fail(self: Ledger, *args: Any, **kwargs: Any) -> Any:
        raise WeightSyncError("the ledger fails")

    monkeypatch.setattr(Ledger, call, fail)


def keys(source: Any) -> int:
    """How many values the trainer's store has."""
    return int(source._sender._line.store.num_keys())


@pytest.mark.parametrize("call", ["announce", "epoch", "seal"])
async def test_a_version_whose_publish_raised_is_never_sent(
    redis_db: str, ledger: Ledger, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Who comes later gets the last version that was committed, at the first attempt."""
    caught_up: list[Any] = []
    catch_up = Sender.catch_up

    async def counted(self: Sender) -> Any:
        caught_up.append("raised")
        caught_up[-1] = await catch_up(self)
        return caught_up[-1]

    async with worker(redis_db, peer_after_s=None) as running, publisher(redis_db) as source:
        assert (await publish(source, 1)).state == "committed"
        before = keys(source)
        assert (await publish(source, 2)).state == "committed"
        assert keys(source) == before
        failing(monkeypatch, call)
        with pytest.raises(WeightSyncError, match="version 3: the ledger fails"):
            await publish(source, 3)
        monkeypatch.undo()
        assert keys(source) == before
        monkeypatch.setattr(Sender, "catch_up", counted)
        async with worker(redis_db, peer_after_s=None) as late:
            await eventually(lambda: late.worker._generation.version)
            assert late.worker._generation.version == running.worker._generation.version == 2
            await eventually(lambda: [result.workers for result in caught_up if result != "raised"] == [(late.id,)])
            assert await ledger.committed() == 2
            assert (await publish(source, 4)).state == "committed"


async def test_a_first_version_that_no_worker_took_is_not_committed_later(
    redis_db: str, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Picky(ScriptedEngine):
        async def prepare_weights(self, order: TransferOrder) -> TransferReport:
            if order.version == 2 and not asked:
                return TransferReport(False, "verify", "DigestMismatch: tensor first")
            return await super().prepare_weights(order)

    want, asked = Ledger.want, list[str]()

    async def counted(self: Ledger, worker_id: str, version: int, adapter: str = "") -> None:
        await want(self, worker_id, version, adapter)
        asked.append(worker_id)

    async with publisher(redis_db) as source:
        assert (await publish(source, 1)).state == "committed"  # into an empty pool
    async with worker(redis_db, engine=Picky(), peer_after_s=None) as running, publisher(redis_db) as source:
        assert (await publish(source, 2)).state == "failed"
        monkeypatch.setattr(Ledger, "want", counted)  # it is behind version 1, and would take 2 now
        await eventually(lambda: len(asked) >= 2)
        assert await ledger.version_state(2) == "failed"
        assert running.worker._generation.version == 0
        assert (await publish(source, 3)).state == "committed"


async def test_an_adapter_whose_publish_raised_leaves_no_bytes_in_the_store(
    redis_db: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with worker(redis_db, engine=ScriptedEngine(lora=True)), publisher(redis_db) as source:
        assert (await adapters.publish(source, "math", 1)).state == "committed"
        before = keys(source)
        failing(monkeypatch, "close")
        with pytest.raises(WeightSyncError, match="the ledger fails"):
            await adapters.publish(source, "math", 2)
        monkeypatch.undo()
        assert keys(source) == before
