"""What a publisher says of settings, tensors and folders that cannot be."""

from __future__ import annotations

import asyncio
import logging
import math
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.peers.publishing import WEIGHTS, publish, publisher
from support.pools.pool import eventually, worker
from support.specimens import adapters

from rolloutmq import InvalidField, WeightPublisher
from rolloutmq.messages import WeightAnnouncement, WeightSyncError
from rolloutmq.sync.disk.errors import SnapshotError
from rolloutmq.sync.packing import packing
from rolloutmq.sync.transfer import Ledger, SyncOptions, SyncSettings

LAYER = torch.nn.Linear(2, 3)
PAIRS = r"\(name, tensor\) pairs, such as model\.named_parameters\(\)"
NAMES = "names of 1 to 512 characters"


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("join_timeout_s", [0, -1, math.inf, math.nan, True, "5", None]),
        ("transfer_timeout_s", [0, math.inf, None]),
        ("port", [70000, -1, True, "80"]),
        ("keep_snapshots", [0, 1.5]),
        ("snapshot_every", [0, True]),
        ("transfer", ["stock"]),
        ("mode", ["whenever"]),
        ("keep", ["nowhere"]),
        ("nonfinite", ["mend"]),
    ],
)
def test_settings_that_cannot_be(redis_db: str, tmp_path: Path, field: str, values: list[Any]) -> None:
    with pytest.raises(InvalidField, match="pool="):
        WeightPublisher(redis_db, "no spaces")
    for value in values:
        for leader in (True, False):  # on every rank alike
            with pytest.raises(InvalidField, match=rf"^{field}={re.escape(repr(value))}: "):
                WeightPublisher(redis_db, leader=leader, snapshots=tmp_path, **{field: value})


async def test_an_older_trainers_transfer_is_refused_by_name(redis_db: str, monkeypatch: pytest.MonkeyPatch) -> None:
    announce = Ledger.announce

    async def announced(self: Ledger, told: WeightAnnouncement) -> None:
        await announce(self, told.model_copy(update={"token": ""}))

    # The first transfer that is prepared in a process imports for seconds.
    async with worker(redis_db) as one, publisher(redis_db, transfer_timeout_s=30.0) as source:
        with monkeypatch.context() as patch:
            patch.setattr(Ledger, "announce", announced)
            report = await publish(source, 1)
        assert report.state == "failed"
        assert "upgrade trainer and workers together" in report.failures[one.id]
        assert one.engine.weights == {}
        assert not one.generation.state.quarantined
        report = await publish(source, 2)
        assert (report.state, report.workers) == ("committed", (one.id,))


def test_every_setting_is_an_option_of_the_publisher_and_has_a_description() -> None:
    assert SyncOptions.__annotations__.keys() | {"snapshots"} == SyncSettings.model_fields.keys()
    assert all(field.description for field in SyncSettings.model_fields.values())


def test_a_port_that_is_taken(redis_db: str) -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(WeightSyncError, match=rf"127\.0\.0\.1:{port}: .*(?i:in use)"):
            WeightPublisher(redis_db, host="127.0.0.1", port=port)


def test_a_folder_that_cannot_be_made(redis_db: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for folder in (file, file / "inside"):
        with pytest.raises(SnapshotError, match=re.escape(f"making {folder}: ")):
            WeightPublisher(redis_db, snapshots=folder)


async def test_a_folder_that_cannot_be_written_any_more(
    redis_db: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "versions"
    async with publisher(redis_db, snapshots=folder) as source:
        folder.rmdir()
        folder.touch()
        assert (await publish(source, 1)).state == "committed"
        await eventually(lambda: source.snapshots_failed == 1)
    (record,) = [each for each in caplog.records if each.name == "rolloutmq.sync.publish.saver"]
    assert record.getMessage().startswith("version 1 could not be saved: ")
    assert str(folder) in record.getMessage()
    assert (record.levelno, record.exc_info) == (logging.ERROR, None)


WRONG: list[tuple[Any, str, list[torch.Tensor]]] = [
    (LAYER, f"'Linear': {PAIRS}", [LAYER.weight, LAYER.bias]),
    (torch.nn.Identity(), f"'Identity': {PAIRS}", []),
    (LAYER.weight, f"'Parameter': {PAIRS}", []),
    (7, f"'int': {PAIRS}", []),
    ("weights.safetensors", f"'str': {PAIRS}", []),
    (list(LAYER.parameters()), f"'Parameter': {PAIRS}", [LAYER.weight, LAYER.bias]),
    ([("a", LAYER.weight, 1), ("b", LAYER.bias)], f"'tuple of 3': {PAIRS}", [LAYER.weight, LAYER.bias]),
    (["ab"], f"'str': {PAIRS}", []),
    ([(7, LAYER.weight), ("b", LAYER.bias)], f"'int': {NAMES}", [LAYER.weight, LAYER.bias]),
    ([(LAYER.weight, "a")], f"'Parameter': {NAMES}", [LAYER.weight]),
    ({None: LAYER.weight}, f"'NoneType': {NAMES}", [LAYER.weight]),
]


def renamed(name: str) -> str:
    assert isinstance(name, str), "rename was asked for the name of something that has none"
    return f"model.{name}"


@pytest.mark.parametrize("rename", [None, renamed])
@pytest.mark.parametrize(("tensors", "says", "parts"), WRONG, ids=lambda value: "")
def test_what_is_no_pairs_is_told_after_the_last_gather(
    monkeypatch: pytest.MonkeyPatch,
    rename: Callable[[str], str] | None,
    tensors: Any,
    says: str,
    parts: list[torch.Tensor],
) -> None:
    """Nor does this rank leave out a gather: another one, which may be right, would wait for it."""
    seen: list[Any] = []

    def gathered(tensor: Any) -> Any:
        seen.append(tensor)
        return tensor

    monkeypatch.setattr(packing, "gathered", gathered)
    with pytest.raises(InvalidField, match=f"^tensors={says}"):
        packing.PackedWeights(1, tensors, rename=rename)
    seen = [each for each in seen if isinstance(each, torch.Tensor)]
    assert [id(each) for each in seen] == [id(part) for part in parts]


async def test_what_is_not_finite_is_told_with_the_way_out(redis_db: str, caplog: pytest.LogCaptureFixture) -> None:
    async with publisher(redis_db) as source:
        for version, names, do in ((1, ["first"], "1 tensor does"), (2, ["first", "third"], "2 tensors do")):
            broken = WEIGHTS | {name: torch.tensor([math.nan]) for name in names}
            report = await asyncio.to_thread(source.publish(version, broken).wait, 60)
            why = f"tensor first has NaN or Inf in it ({do}); nonfinite='allow' sends it"
            assert report.failures == {"trainer": why}
            assert f"version {version} is not sent: {why}" in [each.getMessage() for each in caplog.records]


async def test_an_adapter_that_is_not_sent_is_named(
    redis_db: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tensors(version: int) -> dict[str, torch.Tensor]:
        return {name: torch.full_like(tensor, math.nan) for name, tensor in adapters_tensors(version).items()}

    adapters_tensors = adapters.tensors
    async with publisher(redis_db) as source:
        monkeypatch.setattr(adapters, "tensors", tensors)
        assert (await adapters.publish(source, "math", 1)).state == "failed"
        monkeypatch.undo()

        async def broken(*told: Any) -> Any:
            raise OSError("no way")

        monkeypatch.setattr(source._sender, "send", broken)
        with pytest.raises(WeightSyncError, match=r"^version 2 of adapter math: no way$"):
            await adapters.publish(source, "math", 2)
    told = [each.getMessage() for each in caplog.records if each.name == "rolloutmq.sync.publish.publisher"]
    assert told[0].startswith("version 1 of adapter math is not sent: tensor ")
    assert told[1] == "version 2 of adapter math could not be sent"
