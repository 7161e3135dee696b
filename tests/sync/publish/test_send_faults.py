"""A publish that raises leaves nothing behind: not in the trainer's memory, and not as a version to be sent later."""

from __future__ import annotations

from typing import Any

import pytest
from support.peers.publishing import publish, publisher
from support.pools.pool import eventually, worker

from rolloutmq.messages import WeightSyncError
from rolloutmq.sync.transfer.ledger import Ledger, VersionHolder
from rolloutmq.sync.transfer.order import TransferOrder, TransferReport
from rolloutmq.worker.scripted.engine import ScriptedEngine


def failing(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """This call of the ledger raises, until `monkeypatch.undo`."""

    async def fail(self: Ledger, *args: Any, **kwargs: Any) -> Any:
        raise WeightSyncError("the ledger fails")

    monkeypatch.setattr(Ledger, call, fail)


def offered(source: Any) -> list[int]:
    """The versions that the trainer keeps for others."""
    hub = source._sender._hub
    assert hub._shelf._offers.keys() == hub._outgoing.keys()
    return [outgoing.snapshot.manifest.version for outgoing in hub._outgoing.values()]


@pytest.mark.parametrize("call", ["live_workers", "new_epoch", "announce"])
async def test_a_version_whose_publish_raised_is_never_sent(
    redis_db: str, ledger: Ledger, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Who comes later gets the last version that was committed, at the first attempt."""
    orders: list[TransferOrder] = []

    class Noting(ScriptedEngine):
        async def prepare_weights(self, order: TransferOrder) -> TransferReport:
            orders.append(order)
            return await super().prepare_weights(order)

    async with worker(redis_db) as running, publisher(redis_db) as source:
        for version in (1, 2):
            assert (await publish(source, version)).state == "committed"
            assert offered(source) == [version]
        failing(monkeypatch, call)
        with pytest.raises(WeightSyncError, match="version 3: the ledger fails"):
            await publish(source, 3)
        monkeypatch.undo()
        assert offered(source) == [2]
        async with worker(redis_db, engine=Noting()) as late:
            await eventually(lambda: late.generation.version)
            assert late.generation.version == running.generation.version == 2
            assert [order.version for order in orders] == [2]
            assert await ledger.committed() == 2
            assert (await publish(source, 4)).state == "committed"


async def test_one_that_a_worker_serves_is_had_from_it_though_its_publish_raised(
    redis_db: str, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker's own report commits it, not the trainer."""
    async with worker(redis_db) as running, publisher(redis_db) as source:
        assert (await publish(source, 1)).state == "committed"
        failing(monkeypatch, "close")
        with pytest.raises(WeightSyncError, match="version 2: the ledger fails"):
            await publish(source, 2)
        monkeypatch.undo()
        assert offered(source) == [1]
        assert await ledger.committed() == running.generation.version == 2
        async with worker(redis_db) as late:
            await eventually(lambda: late.generation.version == 2)
            report = await publish(source, 3)
            assert (report.state, set(report.workers)) == ("committed", {running.id, late.id})


async def test_a_first_version_that_no_worker_took_is_not_committed_later(
    redis_db: str, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Picky(ScriptedEngine):
        async def prepare_weights(self, order: TransferOrder) -> TransferReport:
            if order.version == 2 and not asked:
                return TransferReport(False, "verify", "DigestMismatch: tensor first")
            return await super().prepare_weights(order)

    holders, asked = Ledger.holders, list[int]()

    async def counted(self: Ledger, version: int) -> tuple[VersionHolder | None, list[VersionHolder]]:
        asked.append(version)
        return await holders(self, version)

    async with publisher(redis_db) as source:
        assert (await publish(source, 1)).state == "committed"  # into an empty pool
    async with worker(redis_db, engine=Picky()) as running, publisher(redis_db) as source:
        assert (await publish(source, 2)).state == "failed"
        assert offered(source) == []
        monkeypatch.setattr(Ledger, "holders", counted)  # it is behind version 1, and would take 2 now
        await eventually(lambda: len(asked) >= 2)
        assert set(asked) == {1}
        assert await ledger.version_state(2) == "failed"
        assert running.generation.version == 0
        assert (await publish(source, 3)).state == "committed"
