"""What the loader inside the engine lets through, apart from digests: the right names, a report that can be read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from redis.asyncio import Redis
from safetensors.torch import save_file

from rolloutmq.messages.errors import DigestMismatch, MalformedMessage
from rolloutmq.messages.weights import WeightAnnouncement
from rolloutmq.sync.ledger import Ledger
from rolloutmq.sync.loader import _check_names, checkpoint_names
from rolloutmq.sync.transfer import TransferReport


def test_names_come_from_every_file_of_a_checkpoint(tmp_path: Path) -> None:
    assert checkpoint_names(str(tmp_path / "nothing")) is None
    save_file({"a": torch.ones(1)}, tmp_path / "model-1.safetensors")
    save_file({"b": torch.ones(1)}, tmp_path / "model-2.safetensors")
    assert checkpoint_names(str(tmp_path)) == {"a", "b"}


def test_tensors_of_another_model_are_named() -> None:
    expected = frozenset({"model.a", "model.b"})
    _check_names({"model.a", "model.b"}, expected)
    _check_names({"model.a", "model.b", "lm_head.weight"}, expected)  # tied, sent under both names
    _check_names({"model.a", "model.b"}, expected | {"lm_head.weight"})
    # A compiled module's names: the engine would log them and keep its old weights.
    with pytest.raises(DigestMismatch, match=r"unknown \['_orig_mod.model.a'.*missing \['model.a'"):
        _check_names({"_orig_mod.model.a", "model.b"}, expected)
    with pytest.raises(DigestMismatch, match=r"missing \['model.b'\]"):
        _check_names({"model.a"}, expected)


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
    assert epoch is not None
    assert not epoch.reports["w1"].ok
    await redis.aclose()
