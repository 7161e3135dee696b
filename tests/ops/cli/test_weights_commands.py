"""`rolloutmq weights` and `rolloutmq snapshots`, as an operator types them."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis as redis_module
import torch
from click.testing import Result
from support.pools.pool import status
from typer.testing import CliRunner

from rolloutmq.messages import WeightAnnouncement, connect
from rolloutmq.messages.broker.lease import Lease
from rolloutmq.ops.cli.main import app
from rolloutmq.sync.disk.store import SnapshotStore
from rolloutmq.sync.packing.packing import PackedWeights
from rolloutmq.sync.transfer.ledger import Ledger
from rolloutmq.sync.transfer.order import TransferReport

DONE = TransferReport(ok=True, phase="done", tensors=3, nbytes=2048, receive_s=0.25, readback=True, way="pull")
UNREAD = replace(DONE, readback=False)
BROKEN = TransferReport(ok=False, phase="verify", error="tensor a: digest \x1b[31mwrong")


def run(*arguments: str, answer: str | None = None) -> Result:
    return CliRunner().invoke(app, ["weights", *arguments], input=answer)


def on_disk(*arguments: str, answer: str | None = None) -> Result:
    return CliRunner().invoke(app, ["snapshots", *arguments], input=answer)


def in_pool(url: str, work: Any) -> None:
    async def main() -> None:
        async with connect(url) as client:
            await work(client)

    asyncio.run(main())


async def transfer(
    ledger: Ledger, version: int, reports: dict[str, TransferReport], lost: dict[str, str] | None = None, **fields: Any
) -> int:
    """A whole transfer to the workers of `reports`, which none of `lost` has reported. Returns its epoch."""
    base = {"host": "trainer", "port": 1, "token": "secret", "join_timeout_s": 1.0, "transfer_timeout_s": 1.0}
    announcement = WeightAnnouncement(**(base | {"version": version, "epoch": await ledger.new_epoch()} | fields))
    await ledger.announce(announcement)
    for worker, report in reports.items():
        await ledger.report(announcement, worker, report)
    await ledger.close(announcement, any(report.ok for report in reports.values()), None, lost or {})
    return announcement.epoch


@pytest.fixture
def pool(redis_db: str) -> str:
    """Two workers; version 1 reached both, version 2 one and in a second transfer the other, which serves version 1 all
    the same by what it says of itself; version 3 reached nobody."""

    async def fill(client: Any) -> None:
        ledger = Ledger(client, "default")
        for worker, version in (("w1", 2), ("w2", 1)):
            await Lease(client, "default", worker, 600.0).join(status(worker, version=version))
        await transfer(ledger, 1, {"w1": DONE, "w2": DONE})
        await transfer(ledger, 2, {"w1": DONE, "w2": BROKEN})
        await client.hset(ledger.keys.weights, "highest", 1)  # no trainer may announce a number twice
        await transfer(ledger, 2, {"w2": DONE})
        await ledger.new_epoch()  # a re-sent increment: a number without a transfer
        await transfer(ledger, 3, {"w2": BROKEN}, {"w1": "was lost", "w2": "was lost"})

    in_pool(redis_db, fill)
    return redis_db


def test_list(pool: str) -> None:
    state = json.loads(run("list", "--redis", pool, "--json").stdout)
    assert (state["committed_version"], state["transfer_under_way"]) == (2, 0)
    assert [(w["worker_id"], w["version"], w["alive"]) for w in state["workers"]] == [("w1", 2, True), ("w2", 1, True)]
    versions = [(v["version"], v["state"], [t["epoch"] for t in v["transfers"]]) for v in state["versions"]]
    assert versions == [(3, "failed", [5]), (2, "committed", [3, 2]), (1, "committed", [1])]
    latest, second, first = state["versions"]
    assert latest["transfers"][0]["failures"] == {"w1": "was lost", "w2": f"verify: {BROKEN.error}"}
    assert [t["served"] for t in second["transfers"]] == [["w2"], ["w1"]]
    assert first["transfers"][0]["reports"].keys() == {"w1", "w2"}
    assert "secret" not in json.dumps(state), "who knows the token may take the weights"
    times = [version["announced_at"] for version in state["versions"]]
    assert times == sorted(times, reverse=True)
    assert times[-1] > 1.7e9  # Redis' clock, in Unix seconds
    newest = json.loads(run("list", "--redis", pool, "--json", "--limit", "2").stdout)["versions"]
    assert [version["version"] for version in newest] == [3, 2]


def test_list_for_people(pool: str) -> None:
    shown = run("list", "--redis", pool).stdout.splitlines()
    assert shown[0] == "pool default   committed version 2"
    assert shown[1].startswith("version 3: announced 20")
    assert shown[2:5] == [
        "    epochs 5; received by none",
        "    w1: was lost",
        "    w2: verify: tensor a: digest \ufffd[31mwrong",
    ]
    assert "    epochs 2, 3; received by w1, w2" in shown
    assert shown[-2:] == [
        "worker w1 on h: serving, version 2",
        "worker w2 on h: serving, version 1, waits for a newer one",
    ]


def test_list_has_adapters(pool: str) -> None:
    assert json.loads(run("list", "--redis", pool, "--json").stdout)["adapters"] == {}

    async def publish(client: Any) -> None:
        ledger = Ledger(client, "default")
        for name, version in (("style", 7), ("math", 1), ("math", 2)):
            await transfer(ledger, version, {"w1": DONE}, adapter=name)
        await transfer(ledger, 3, {"w1": BROKEN}, adapter="math")

    in_pool(pool, publish)
    state = json.loads(run("list", "--redis", pool, "--json").stdout)
    assert list(state["adapters"].items()) == [("math", 2), ("style", 7)]
    assert [version["version"] for version in state["versions"]] == [3, 2, 1]
    shown = run("list", "--redis", pool).stdout.splitlines()
    assert shown[-4:-2] == ["adapter math: version 2", "adapter style: version 7"]


def test_list_of_a_pool_without_versions(redis_db: str) -> None:
    assert run("list", "--redis", redis_db).stdout.splitlines() == [
        "pool default   committed version 0",
        "no version was published: workers serve the model as they load it from disk",
    ]


def test_a_transfer_under_way_and_one_that_cannot_be_read(pool: str) -> None:
    async def begin(client: Any) -> None:
        ledger = Ledger(client, "default")
        announcement = WeightAnnouncement(
            version=4, epoch=await ledger.new_epoch(), host="t", port=1, join_timeout_s=1.0, transfer_timeout_s=1.0
        )
        await ledger.announce(announcement)
        await ledger.report(announcement, "w2", BROKEN)

    in_pool(pool, begin)
    with redis_module.Redis.from_url(pool) as client:
        client.hset("rmq:{default}:epoch:5", "m", b"\xff\x00 from the future")
    assert "transfer 6 under way" in run("list", "--redis", pool).stdout
    shown = run("show", "4", "--redis", pool).stdout
    assert "epoch 6: open, resume from t:1" in shown
    assert "w2: verify: tensor a" in shown
    versions = json.loads(run("list", "--redis", pool, "--json").stdout)["versions"]
    assert [version["version"] for version in versions] == [4, 2, 1]


def test_show(pool: str) -> None:
    record = json.loads(run("show", "2", "--redis", pool, "--json").stdout)
    late, early = record["transfers"]
    assert (late["epoch"], late["served"], late["failures"]) == (3, ["w2"], {})
    assert early["reports"]["w1"]["nbytes"] == 2048
    assert early["failures"] == {"w2": f"verify: {BROKEN.error}"}
    shown = run("show", "2", "--redis", pool).stdout
    assert "epoch 3: closed, resume from trainer:1" in shown
    assert "    w1: 3 tensors, 2,048 bytes by pull; " in shown
    assert "receive 0.250 s" in shown
    assert "    w2: verify: tensor a" in shown
    assert "\x1b" not in shown
    assert "not read back" not in shown


def test_show_says_on_which_worker_nothing_was_read_back(pool: str) -> None:
    in_pool(pool, lambda client: transfer(Ledger(client, "default"), 4, {"w1": DONE, "w2": UNREAD}))
    first, second = run("show", "4", "--redis", pool).stdout.splitlines()[-2:]
    assert first.startswith("    w1: 3 tensors")
    assert "not read back" not in first
    assert second.startswith("    w2: 3 tensors")
    assert second.endswith("; not read back")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    store = SnapshotStore(tmp_path / "versions", keep=9)
    for version in (1, 2, 3):
        weights = {"a": torch.full((40,), float(version)), "b": torch.arange(7)}
        store.save(PackedWeights(version, weights.items()).snapshot())
    return tmp_path / "versions"


def test_snapshots_are_listed_and_verified(folder: Path) -> None:
    listed = json.loads(on_disk(str(folder), "--json").stdout)
    found = [(one["version"], one["tensors"], one["verified"], one["problem"]) for one in listed]
    assert found == [(version, 2, False, "") for version in (1, 2, 3)]
    (file,) = Path(listed[1]["path"]).glob("*.safetensors")
    content = bytearray(file.read_bytes())
    assert listed[1]["nbytes"] == len(content)
    content[-1] ^= 1
    file.write_bytes(content)
    assert on_disk(str(folder)).exit_code == 0  # sizes and headers are as they were
    shown = on_disk(str(folder), "--verify")
    assert shown.exit_code == 1
    lines = shown.stdout.splitlines()
    assert [line.endswith("verified") for line in lines] == [True, False, True]
    assert f"DigestMismatch: tensor a in {file}" in lines[1]
    file.unlink()
    shown = on_disk(str(folder), "--json")
    assert shown.exit_code == 1
    assert "BrokenSnapshot" in json.loads(shown.stdout)[1]["problem"]


def test_what_is_removed_is_asked_for_and_leaves_what_is_pinned(folder: Path) -> None:
    def left(*options: str, answer: str | None = None) -> list[tuple[int, bool]]:
        done = on_disk(str(folder), "--json", *options, answer=answer)
        return [(one["version"], one["pinned"]) for one in json.loads(done.stdout)]

    assert left("--pin", "1") == [(1, True), (2, False), (3, False)]
    assert on_disk(str(folder), "--keep", "1", answer="n\n").exit_code == 1
    assert SnapshotStore(folder).versions() == [1, 2, 3]
    assert left("--keep", "1", "--yes") == [(1, True), (3, False)]
    assert "pinned" in on_disk(str(folder)).stdout.splitlines()[0]
    assert left("--unpin", "1") == [(1, False), (3, False)]
    assert left("--keep", "1", "--yes") == [(3, False)]
    assert left("--keep", "1", "--yes") == [(3, False)]


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("snapshots nowhere", "is not a folder"),
        ("snapshots nowhere --keep 1 --yes", "is not a folder"),
        ("snapshots nowhere --keep 0", "1"),
        ("snapshots . --pin 7", "NoSuchSnapshot"),
        ("weights show 9", "knows no version 9"),
        ("weights show 0", "at least 1"),
        ("weights show", "ConfigError: give the version with show"),
        ("weights list 3", "ConfigError: give the version with show"),
        ("weights reset 3 --yes", "ConfigError: give the version with show"),
    ],
)
def test_what_cannot_be_is_refused(
    command: str, says: str, redis_db: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    at = ["--redis", redis_db] if command.startswith("weights") else []
    shown = CliRunner().invoke(app, [*command.split(), *at])
    assert (shown.exit_code, says in shown.stderr) == (2, True), shown.output
