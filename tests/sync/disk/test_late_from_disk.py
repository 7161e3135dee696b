"""Who comes late, or comes back, reads the committed version from disk, and serves when it is verified."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.pools.late import check_equal, is_waiting, publish, publish_and_leave, publisher, serve, weights
from support.pools.pool import eventually, worker

from rolloutmq.sync.disk import DiskVersion
from rolloutmq.sync.disk.store import SnapshotStore
from rolloutmq.sync.packing.packing import PackedWeights
from rolloutmq.sync.transfer.ledger import Ledger
from rolloutmq.sync.transfer.order import TransferOrder, TransferReport
from rolloutmq.worker.scripted.engine import ScriptedEngine


async def test_a_late_worker_reads_the_committed_version_from_disk(
    redis_db: str, ledger: Ledger, tmp_path: Path
) -> None:
    await publish_and_leave(redis_db, 1, 2, snapshots=tmp_path)
    async with worker(redis_db, snapshots=str(tmp_path)) as late:
        assert await serve(redis_db, 3) == {(2,)}
        check_equal(late.engine, 2)
        assert not await is_waiting(ledger, late)
        late.engine.weights = {}
        late.engine.kill()  # a restarted engine finds it again
        await eventually(lambda: late.engine.starts == 2)
        assert await serve(redis_db, 2, before=3) == {(2,)}
        check_equal(late.engine, 2)
        async with publisher(redis_db) as source:
            assert (await publish(source, 3)).workers == (late.id,)
        assert await serve(redis_db, 1, before=5) == {(3,)}


def damage(folder: Path) -> None:
    (file,) = folder.glob("v*/*.safetensors")
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)


def of_another_run(folder: Path) -> None:
    """The folder has this number from an earlier training."""
    other = PackedWeights(2, weights(7)).snapshot()
    for version in folder.glob("v*"):
        version.rename(folder.parent / "aside")
    SnapshotStore(folder).save(other)


@pytest.mark.parametrize(
    ("spoil", "said"), [(damage, "digest"), (of_another_run, "other tensors than the version that the pool committed")]
)
async def test_a_snapshot_that_is_not_the_version_is_refused_and_others_are_asked(  # noqa: PLR0917 – fixtures
    redis_db: str,
    ledger: Ledger,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    spoil: Callable[[Path], None],
    said: str,
) -> None:
    folder = tmp_path / "snapshots"
    await publish_and_leave(redis_db, 2, snapshots=folder)
    spoil(folder)
    async with worker(redis_db, snapshots=str(folder)) as late:
        await eventually(lambda: any("is refused" in record.message for record in caplog.records))
        await eventually(lambda: is_waiting(ledger, late))
        assert [said in record.message for record in caplog.records if "is refused" in record.message] == [True]
        assert late.engine.weights == {}
        async with publisher(redis_db) as source:
            await publish(source, 3)
        assert await serve(redis_db, 1) == {(3,)}


async def test_reading_stops_for_a_transfer(redis_db: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await publish_and_leave(redis_db, 1, snapshots=tmp_path)
    reading, go_on = threading.Event(), threading.Event()
    honest = DiskVersion.__iter__

    def slowly(self: DiskVersion) -> Iterator[Any]:
        for pair in honest(self):
            yield pair
            reading.set()
            while not go_on.is_set():
                yield pair

    monkeypatch.setattr(DiskVersion, "__iter__", slowly)
    async with worker(redis_db, snapshots=str(tmp_path)) as late, publisher(redis_db) as source:
        await asyncio.to_thread(reading.wait, 10)
        assert (await publish(source, 2)).workers == (late.id,)
        go_on.set()
        assert await serve(redis_db, 1) == {(2,)}
        check_equal(late.engine, 2)


async def test_an_engine_in_quarantine_is_mended_from_disk(redis_db: str, tmp_path: Path) -> None:
    class Torn(ScriptedEngine):
        commits = 0

        async def commit_weights(self, order: TransferOrder) -> TransferReport:
            self.commits += 1
            report = await super().commit_weights(order)
            return TransferReport(False, "load", "CUDA error", intact=False) if self.commits == 1 else report

    await publish_and_leave(redis_db, 1, snapshots=tmp_path)
    engine = Torn()
    async with worker(redis_db, engine=engine, snapshots=str(tmp_path)):
        assert await serve(redis_db, 2) == {(1,)}
        assert (engine.commits, engine.starts) == (2, 1)
        check_equal(engine, 1)


async def test_saving_delays_nothing_and_the_newest_wins(redis_db: str, tmp_path: Path) -> None:
    class Slow(SnapshotStore):
        def __init__(self) -> None:
            super().__init__(tmp_path, 5)
            self.began, self.free = threading.Event(), threading.Event()

        def save(self, snapshot: Any) -> Path:
            self.began.set()
            assert self.free.wait(20)
            if snapshot.manifest.version == 9:
                raise OSError("no space left on device")
            return super().save(snapshot)

    store = Slow()
    async with publisher(redis_db, snapshots=store) as source:
        await publish(source, 1)
        await asyncio.to_thread(store.began.wait, 10)
        for version in (2, 3, 4):
            assert (await publish(source, version)).state == "committed"
        assert source.snapshots_saved == 0
        store.free.set()
        await eventually(lambda: source.snapshots_saved == 2)
        assert store.versions() == [1, 4]
        await publish(source, 9)
        await eventually(lambda: source.snapshots_failed == 1)
        assert (await publish(source, 10)).state == "committed"
    assert store.versions() == [1, 4, 10]  # closing waits for what is being saved


async def test_which_versions_are_saved(redis_db: str, tmp_path: Path) -> None:
    async with publisher(redis_db, snapshots=tmp_path, snapshot_every=3, keep_snapshots=2) as source:
        for version in range(1, 9):
            await publish(source, version)
            await eventually(lambda: source._saver is not None and source._saver._next is None)
        await eventually(lambda: SnapshotStore(tmp_path).versions() == [4, 7])
    assert SnapshotStore(tmp_path).versions() == [7, 8], "and the newest one, when its trainer ends"
