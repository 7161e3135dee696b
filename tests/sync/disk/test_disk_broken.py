"""Snapshots that are not what was written: refused, and said why, with the name of the tensor and the file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.peers.disk_weights import snapshot

from rolloutmq.messages import DigestMismatch
from rolloutmq.sync.disk import index as disk_index
from rolloutmq.sync.disk.errors import BrokenSnapshot
from rolloutmq.sync.disk.store import SnapshotStore


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    return SnapshotStore(tmp_path / "versions", file_bytes=6000)


def spoil_index(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    """An index that says something else, and has the checksum for it."""

    def spoil(path: Path) -> None:
        raw = json.loads((path / "rolloutmq.json").read_text())
        del raw["sha256"]
        change(raw)
        (path / "rolloutmq.json").write_text(json.dumps(raw | {"sha256": disk_index._digest(raw)}))

    return spoil


def first(raw: dict[str, Any]) -> dict[str, Any]:
    return next(tensor for tensor in raw["manifest"]["tensors"] if tensor["name"] == "model.embed.weight")


def file_one(path: Path) -> Path:
    return min(path.glob("*.safetensors"))


def to_link(path: Path) -> None:
    inside, outside = file_one(path), path.parent.parent / "outside"
    inside.rename(outside)
    inside.symlink_to(outside)


def to_fifo(path: Path) -> None:
    target = file_one(path)
    target.unlink()
    os.mkfifo(target)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: os.truncate(file_one(path), 100), "100 bytes, should be"),
        (lambda path: os.truncate(file_one(path), 1 << 20), "1048576 bytes, should be"),
        (lambda path: file_one(path).unlink(), "No such file"),
        (to_link, "symbolic link"),
        (to_fifo, "plain file"),
        (lambda path: (path / "rolloutmq.json").write_bytes(b"\x00garbage"), r"rolloutmq\.json"),
        (lambda path: (path / "rolloutmq.json").write_bytes(b""), r"rolloutmq\.json"),
        (lambda path: (path / "rolloutmq.json").write_bytes(b"[" * 100000), r"rolloutmq\.json"),
        (lambda path: (path / "rolloutmq.json").write_bytes(b"[1]"), "not an object"),
        (spoil_index(lambda raw: raw.update(format=2)), "format 2, this version of rolloutmq reads 1"),
        (spoil_index(lambda raw: raw["manifest"].update(version=2)), "is about version 2"),
        (spoil_index(lambda raw: raw["files"][0].update(name="../../x.safetensors")), "files="),
        (spoil_index(lambda raw: raw["files"][0].update(nbytes=1 << 62)), "files="),
        (spoil_index(lambda raw: raw["files"].pop()), "files="),
        (spoil_index(lambda raw: raw["files"][0].update(tensors=1 << 40)), "files="),
        (spoil_index(lambda raw: raw.update(beside=[{"name": "../x", "nbytes": 1, "sha256": "0" * 64}])), "beside"),
        (spoil_index(lambda raw: raw.update(beside=[{"name": "/x", "nbytes": 1, "sha256": "0" * 64}])), "beside"),
        (spoil_index(lambda raw: first(raw).update(dtype="load")), "load"),
        (spoil_index(lambda raw: first(raw).update(shape=[1 << 40, 1 << 40])), "nbytes"),
        (spoil_index(lambda raw: first(raw).update(name="odd")), "every name once"),
        (spoil_index(lambda raw: first(raw).update(name="__metadata__")), "__metadata__"),
        (spoil_index(lambda raw: first(raw).update(name="model.embed.weighT")), "header"),
        (spoil_index(lambda raw: first(raw).update(dtype="float16")), "header"),
        (spoil_index(lambda raw: first(raw).update(surprise=1)), "surprise"),
        (spoil_index(lambda raw: raw.update(surprise=1)), "surprise"),
    ],
)
def test_what_is_broken_is_not_opened(store: SnapshotStore, spoil: Callable[[Path], None], message: str) -> None:
    path = store.save(snapshot(1))
    spoil(path)
    with pytest.raises(BrokenSnapshot, match=message):
        store.load(1)
    opened = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    assert not [file for file in opened if file.startswith(str(path))]


def test_an_index_that_somebody_has_edited(store: SnapshotStore) -> None:
    """Also where nothing else depends on what it says."""
    path = store.save(snapshot(1))
    raw = json.loads((path / "rolloutmq.json").read_text())
    (path / "rolloutmq.json").write_text(json.dumps(raw | {"created": "2001-01-01"}))
    with pytest.raises(BrokenSnapshot, match="sha256"):
        store.load(1)


def test_every_flipped_byte_is_found(store: SnapshotStore) -> None:
    """In headers, tensors, the weight map and the index; in a tensor with its name and the file's."""
    path = store.save(snapshot(1))
    with store.load(1) as found:
        places = {
            (shard.name, byte): spec.name
            for shard in found.index.shards()
            for spec in shard.specs
            for byte in range(shard.starts[spec.name], shard.starts[spec.name] + spec.nbytes)
        }
    for name in sorted(os.listdir(path)):
        content = (path / name).read_bytes()
        for place in {0, len(content) - 1, *range(5, len(content), 211)}:
            spoilt = bytearray(content)
            spoilt[place] ^= 1 << (place % 8)
            (path / name).write_bytes(spoilt)
            with pytest.raises((DigestMismatch, BrokenSnapshot)) as caught, store.load(1) as found:
                found.verify()
            if tensor := places.get((name, place)):
                assert caught.type is DigestMismatch
                assert f"tensor {tensor} in {path / name}" in str(caught.value)
        (path / name).write_bytes(content)
    with store.load(1) as found:
        found.verify()


def test_a_file_that_shrinks_while_it_is_read(store: SnapshotStore) -> None:
    path = store.save(snapshot(1))
    with store.load(1) as found:
        os.truncate(file_one(path), 700)
        with pytest.raises(BrokenSnapshot, match="ends before byte"):
            list(found)
