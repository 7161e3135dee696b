"""File systems that refuse: nothing is left behind, nothing is lost, and the order of writes survives a power cut."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.peers.disk_weights import check_versions, leftovers, snapshot

from rolloutmq.messages import WeightSyncError
from rolloutmq.sync.disk.errors import SnapshotError
from rolloutmq.sync.disk.store import SnapshotStore


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    return SnapshotStore(tmp_path / "versions", file_bytes=6000)


@contextmanager
def largest_file(nbytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("nbytes", [0, 100, 1000, 5000])
def test_a_write_that_is_refused_leaves_nothing(store: SnapshotStore, tmp_path: Path, nbytes: int) -> None:
    store.save(snapshot(1))
    with largest_file(nbytes), pytest.raises(SnapshotError, match="File too large"):
        store.save(snapshot(2))
    assert check_versions(store, tmp_path / "versions") == [1]
    assert leftovers(tmp_path / "versions") == []
    store.save(snapshot(2))
    assert check_versions(store, tmp_path / "versions") == [1, 2]


def test_a_full_disk(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", disk], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("no file system can be mounted here")
    try:
        store = SnapshotStore(disk / "versions", keep=9)

        def fill() -> None:
            for version in range(1, 9):
                store.save(snapshot(version))

        with pytest.raises(SnapshotError, match="No space left"):
            fill()
        assert leftovers(disk / "versions") == []
        *_, last = check_versions(store, disk / "versions")
        SnapshotStore(disk / "versions", keep=1).collect()
        store.save(snapshot(last + 1))
        assert check_versions(store, disk / "versions") == [last, last + 1]
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.mark.parametrize("call", ["fsync", "rename", "mkdir"])
@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.EROFS])
def test_calls_that_fail(
    store: SnapshotStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    def fail(*args: Any, **more: Any) -> None:
        raise OSError(number, os.strerror(number))

    store.save(snapshot(1))
    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(SnapshotError, match=os.strerror(number)) as caught:
            store.save(snapshot(2))
    assert isinstance(caught.value, WeightSyncError)
    assert check_versions(store, tmp_path / "versions") == [1]
    store.save(snapshot(2))
    assert leftovers(tmp_path / "versions") == []


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SnapshotError, match=r"File exists|Not a directory"):
        SnapshotStore(tmp_path / "file").save(snapshot(1))


def test_old_versions_that_cannot_be_removed_do_not_fail_a_save(
    store: SnapshotStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*args: Any, **more: Any) -> None:
        raise SnapshotError("no")

    monkeypatch.setattr(store, "collect", refuse)
    store.save(snapshot(1))
    assert store.versions() == [1]
    assert "could not be removed" in caplog.text


def test_everything_is_on_disk_before_the_version_has_its_name(
    store: SnapshotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process may be killed any time; for a power cut the order of fsync and rename is what counts."""
    done: list[tuple[str, str]] = []
    fsync, rename, rmtree = os.fsync, os.rename, shutil.rmtree

    def name(path: Any) -> str:
        return Path(path).name.rpartition("-")[0] if ".gone" in str(path) else Path(path).name.partition("-v")[0]

    def note_fsync(fd: int) -> None:
        fsync(fd)
        done.append(("fsync", Path(os.readlink(f"/proc/self/fd/{fd}")).name))

    def note_rename(old: Any, new: Any) -> None:
        rename(old, new)
        done.append(("rename", name(new)))

    def note_rmtree(path: Any, **more: Any) -> None:
        done.append(("delete", name(path)))
        rmtree(path, **more)

    for version in (1, 2):
        store.save(snapshot(version))
    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "rename", note_rename)
    monkeypatch.setattr(shutil, "rmtree", note_rmtree)
    path = store.save(snapshot(3))
    published = done.index(("rename", path.name))
    assert {name for what, name in done[:published] if what == "fsync"} >= set(os.listdir(path))
    assert done[published - 1][0] == "fsync"
    assert done[published - 1][1].startswith(".new-v000000000003")
    removed = [("rename", ".gone-v000000000001"), ("fsync", "versions"), ("delete", ".gone-v000000000001")]
    assert done[published + 1 :] == [("fsync", "versions"), *removed]
