"""Reports of transfers: read from a newer worker, and refused where they make no sense."""

from __future__ import annotations

import pytest
from redis.asyncio import Redis

from rolloutmq.messages.errors import MalformedMessage
from rolloutmq.messages.model.weights import WeightAnnouncement
from rolloutmq.sync.transfer.ledger import Ledger
from rolloutmq.sync.transfer.order import TransferReport


def test_a_report_of_a_newer_worker_is_read_and_nonsense_is_not() -> None:
    report = TransferReport(ok=False, phase="verify", error="no")
    assert TransferReport.from_json(report.to_json()) == report
    assert TransferReport.from_json('{"ok": true, "phase": "done", "new": 1}') == TransferReport(True, "done")
    for text in ("", "[]", "{}", '{"ok": 1, "phase": "done"}', '{"ok": true, "phase": "x"}', "[" * 100_000):
        with pytest.raises(MalformedMessage):
            TransferReport.from_json(text)


async def test_one_unreadable_report_is_a_failure_of_its_worker(redis_db: str) -> None:
    redis = Redis.from_url(redis_db)
    ledger = Ledger(redis, "default")
    announcement = WeightAnnouncement(
        version=1, epoch=await ledger.new_epoch(), host="h", port=1, join_timeout_s=1, transfer_timeout_s=1
    )
    await ledger.announce(announcement)
    await redis.hset(ledger.keys.epoch(announcement.epoch), "report:w1", b"\xff")
    epoch = await ledger.epoch(announcement.epoch)
    assert not epoch.reports["w1"].ok
    await redis.aclose()
