"""A number stands for one set of tensors, for ever; and who cannot take a version holds up nobody."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from support.peers.publishing import WEIGHTS, publish, publisher
from support.pools.pool import dump, eventually, worker

from rolloutmq import InvalidField
from rolloutmq.messages import WeightSyncError
from rolloutmq.messages.errors import MalformedMessage
from rolloutmq.messages.model.weights import WeightAnnouncement
from rolloutmq.producer.control import PoolControl
from rolloutmq.sync.transfer.ledger import Ledger
from rolloutmq.sync.transfer.order import TransferOrder, TransferReport
from rolloutmq.worker.scripted.engine import ScriptedEngine


def announcement(version: int, epoch: int) -> WeightAnnouncement:
    return WeightAnnouncement(
        version=version, epoch=epoch, host="127.0.0.1", port=1, token="t", join_timeout_s=1.0, transfer_timeout_s=1.0
    )


async def test_a_number_that_was_announced_is_not_given_again(redis_db: str, ledger: Ledger) -> None:
    """A trainer died before its version was committed: some worker may serve it, with nobody's word for it."""
    assert await ledger.newest() == {"": 0}
    await ledger.announce(announcement(5, await ledger.new_epoch()))
    with pytest.raises(WeightSyncError, match="version 3: another trainer"):
        await ledger.announce(announcement(3, await ledger.new_epoch()))
    assert (await ledger.newest(), await ledger.committed()) == ({"": 5}, 0)
    async with publisher(redis_db) as source:
        assert source.last_version == 5
        with pytest.raises(InvalidField, match="version=5"):
            source.publish(5, WEIGHTS.items())
        assert (await publish(source, 6)).state == "committed"


async def test_only_the_same_weights_come_again_under_their_number(ledger: Ledger) -> None:
    """A trainer was killed before any worker had them. Once one has, nobody needs them again."""
    first = announcement(5, await ledger.new_epoch()).model_copy(update={"digest": "a" * 32})
    await ledger.announce(first)
    for change in ({"digest": "b" * 32}, {"digest": ""}, {"version": 4}):
        with pytest.raises(WeightSyncError, match="another trainer"):
            await ledger.announce(first.model_copy(update=change | {"epoch": await ledger.new_epoch()}))
    again = first.model_copy(update={"epoch": await ledger.new_epoch()})
    await ledger.announce(again)
    await ledger.report(again, "w", TransferReport(ok=True, phase="done"))
    assert (await ledger.committed(), await ledger.digest_of(5)) == (5, "a" * 32)
    with pytest.raises(WeightSyncError, match="another trainer"):
        await ledger.announce(first.model_copy(update={"epoch": await ledger.new_epoch()}))


async def test_every_rank_of_a_trainer_knows_the_next_version(
    redis_db: str, ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    """All ranks call `publish(last_version + 1)`, and only one of them sends."""
    await ledger.announce(announcement(5, await ledger.new_epoch()))
    told = announcement(2, await ledger.new_epoch()).model_copy(update={"adapter": "tutor"})
    await ledger.announce(told)
    async with publisher(redis_db, leader=False) as helper:
        assert (helper.last_version, helper.last_adapter_version("tutor")) == (5, 2)
        assert helper.publish(6, WEIGHTS.items()).wait(0).state == "delegated"
        assert helper.last_version == 6
    await ledger.adapters()
    assert "not a number" not in caplog.text  # a digest is none, and nobody takes it for one


async def test_nor_is_an_adapters(redis_db: str, ledger: Ledger) -> None:
    told = announcement(4, await ledger.new_epoch()).model_copy(update={"adapter": "tutor"})
    await ledger.announce(told)
    with pytest.raises(WeightSyncError, match="version 2: another trainer"):
        await ledger.announce(told.model_copy(update={"version": 2, "epoch": await ledger.new_epoch()}))
    assert (await ledger.newest(), await ledger.adapters()) == ({"": 0, "tutor": 4}, {})  # a counter of its own


class Picky(ScriptedEngine):
    """Refuses version 2, as a model does that does not know one of its names."""

    async def prepare_weights(self, order: TransferOrder) -> TransferReport:
        if order.version == 2:
            return TransferReport(ok=False, phase="rendezvous", error="DigestMismatch: unknown ['x']")
        return await super().prepare_weights(order)


async def test_a_version_that_nobody_took_is_not_what_late_workers_get(redis_db: str, ledger: Ledger) -> None:
    async with worker(redis_db, engine=Picky()), publisher(redis_db) as source:
        assert (await publish(source, 1)).state == "committed"
        assert (await publish(source, 2)).state == "failed"
        async with worker(redis_db, engine=Picky()) as late:
            await eventually(lambda: late.generation.state.in_service, 10)
            assert late.generation.version == 1


async def test_who_refuses_again_and_again_asks_less_and_less(redis_db: str) -> None:
    class Timed(Picky):
        def __init__(self) -> None:
            super().__init__()
            self.asked: list[float] = []

        async def prepare_weights(self, order: TransferOrder) -> TransferReport:
            self.asked.append(time.monotonic())
            return await super().prepare_weights(order)

    engine = Timed()
    async with worker(redis_db), publisher(redis_db) as source:
        assert (await publish(source, 2)).state == "committed"
        async with worker(redis_db, engine=engine) as late:
            await eventually(lambda: len(engine.asked) == 4)
            assert not late.generation.state.in_service
    assert engine.asked[2] - engine.asked[1] >= 1.0
    assert engine.asked[3] - engine.asked[2] >= 3.0


async def test_a_report_that_is_sent_twice_is_one(ledger: Ledger) -> None:
    """Its reply was lost, and the transfer was closed before it came again."""
    told = announcement(1, await ledger.new_epoch())
    await ledger.announce(told)
    good = TransferReport(ok=True, phase="done", holder="127.0.0.1:1")
    await ledger.report(told, "w", good)
    assert await ledger.committed() == 1
    assert await ledger.close(told, committed=False, holder=None, lost={})  # committed stays committed
    before = await dump(ledger.redis, ("bell", "transfers"))
    await ledger.report(told, "w", good)
    assert await dump(ledger.redis, ("bell", "transfers")) == before
    assert (await ledger.epoch(told.epoch)).reports == {"w": good}  # type: ignore[union-attr]


async def test_a_number_is_given_to_one_set_of_weights(redis_db: str, tmp_path: Path) -> None:
    """Else samples of a trainer's version 7 and of an operator's could not be told apart."""
    async with (
        PoolControl(redis_db) as control,
        publisher(redis_db) as trainer,
        worker(redis_db) as one,
        worker(redis_db) as other,
    ):
        await publish(trainer, 3)
        (await control.save(str(tmp_path), worker_id=one.id)).check()
        folder = tmp_path / "v000000000003"
        (await control.set_version(7)).check()
        assert await control.versions() == {one.id: 7, other.id: 7}
        with pytest.raises(WeightSyncError, match=r"version 7: .* an operator's command has given this number"):
            await publish(trainer, 7)
        answers = await control.load(str(folder), 7)
        assert {answer.kind for answer in answers.values()} == {"InvalidField"}
        (await control.load(str(folder), 8, worker_id=one.id)).check()
        refused = (await control.set_version(8, worker_id=other.id))[other.id]
        assert (refused.kind, "above 8: that number is taken" in refused.error) == ("InvalidField", True)
        (await control.load(str(folder), 8, worker_id=other.id)).check()
        assert await control.versions() == {one.id: 8, other.id: 8}
        assert (await publish(trainer, 9)).state == "committed"


def test_a_report_of_a_newer_worker_is_read_and_nonsense_is_not() -> None:
    report = TransferReport(ok=False, phase="verify", error="no")
    assert TransferReport.from_json(report.to_json()) == report
    assert TransferReport.from_json('{"ok": true, "phase": "done", "new": 1}') == TransferReport(True, "done")
    for text in ("", "[]", "{}", '{"ok": 1, "phase": "done"}', '{"ok": true, "phase": "x"}', "[" * 100_000):
        with pytest.raises(MalformedMessage):
            TransferReport.from_json(text)
