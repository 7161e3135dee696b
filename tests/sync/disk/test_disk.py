"""Snapshots on disk: every bit back, readable by others, and whatever is wrong with them said with a name."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from support.peers.disk_weights import bits, check_versions, leftovers, snapshot, tensors

from rolloutmq.messages import DigestMismatch, InvalidField, TensorSpec, WeightManifest
from rolloutmq.ops.tiny_model import write_tiny_model
from rolloutmq.sync.disk import folder as disk_folder
from rolloutmq.sync.disk.errors import BrokenSnapshot, NoSuchSnapshot, SnapshotConflict, SnapshotError
from rolloutmq.sync.disk.store import SnapshotStore
from rolloutmq.sync.packing.packing import PackedWeights
from rolloutmq.sync.tensors.snapshot import Snapshot
from rolloutmq.worker.cpu_support import prepare_transformers


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    return SnapshotStore(tmp_path / "versions", file_bytes=6000)


def folder_of(store: SnapshotStore, version: int = 1) -> Path:
    with store.load(version) as found:
        return found.path


def test_every_bit_comes_back(store: SnapshotStore) -> None:
    sent = snapshot(1)
    path = store.save(sent)
    assert store.versions() == [1]
    with store.load() as found:
        assert (found.version, found.path, found.manifest) == (1, path, sent.manifest)
        assert len(found.index.files) > 1
        back = {spec.name: tensor for spec, tensor in found}
        assert back.keys() == tensors(1).keys()
        for name, tensor in tensors(1).items():
            assert (back[name].dtype, back[name].shape) == (tensor.dtype, tensor.shape)
            assert bits(back[name]) == bits(tensor)
        found.verify()


def test_other_readers_of_checkpoints(store: SnapshotStore) -> None:
    path = store.save(snapshot(1))
    where = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    assert where.keys() == tensors(1).keys()
    for name, tensor in tensors(1).items():
        with safe_open(path / where[name], framework="pt") as file:
            assert file.metadata() == {"format": "pt"}
            assert bits(file.get_tensor(name)) == bits(tensor)
    whole = {name: tensor for file in set(where.values()) for name, tensor in load_file(path / file).items()}
    assert {name: bits(tensor) for name, tensor in whole.items()} == {n: bits(t) for n, t in tensors(1).items()}


def test_with_a_model_beside_it_is_a_checkpoint(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text("{}")
    (base / "tokenizer.json").symlink_to(tmp_path / "elsewhere.json")  # a hub's cache is made of links
    (tmp_path / "elsewhere.json").write_text("[1]")
    for name in ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", ".hidden.json"):
        (base / name).write_text("old")
    store = SnapshotStore(tmp_path / "versions", base=base)
    path = store.save(snapshot(1))
    assert (path / "config.json").read_text() == "{}"
    assert (path / "tokenizer.json").read_text() == "[1]"
    assert not (path / "tokenizer.json").is_symlink()
    ours = {"rolloutmq.json", "model.safetensors.index.json", "model-00001-of-00001.safetensors"}
    assert set(os.listdir(path)) == ours | {"config.json", "tokenizer.json"}
    (path / "tokenizer.json").write_text("[2]")
    with store.load() as found, pytest.raises(BrokenSnapshot, match=r"tokenizer\.json"):
        found.verify()
    with pytest.raises(InvalidField, match="base"):
        SnapshotStore(tmp_path / "versions", base=tmp_path / "nowhere").save(snapshot(2))
    assert leftovers(tmp_path / "versions") == []


def test_the_same_again_is_nothing_and_another_is_refused(store: SnapshotStore) -> None:
    path = store.save(snapshot(1))
    before = os.stat(path / "rolloutmq.json")
    assert store.save(snapshot(1, bucket_bytes=1 << 20)) == path  # the same tensors, in other buckets
    assert os.stat(path / "rolloutmq.json") == before
    with pytest.raises(SnapshotConflict, match="other tensors"):
        store.save(snapshot(1, seed=2))
    assert check_versions(store, path.parent) == [1]


def test_swapped_tensors_are_found_before_they_are_published(store: SnapshotStore) -> None:
    whole = snapshot(1)
    whole.buckets[0][0] ^= 1  # what is in memory is not what was digested
    with pytest.raises(DigestMismatch, match=re.escape(whole.manifest.tensors[0].name)):
        store.save(whole)
    assert store.versions() == []


@pytest.mark.parametrize(
    "wrong",
    [{"dtype": "complex128"}, {"dtype": "float31"}, {"shape": (3,)}, {"name": "__metadata__"}, {"offset": 4096}],
)
def test_what_safetensors_cannot_hold(store: SnapshotStore, tmp_path: Path, wrong: dict[str, Any]) -> None:
    spec = TensorSpec(name="w", dtype="float32", shape=(4,), bucket=0, offset=0, nbytes=16, digest="0" * 16)
    manifest = WeightManifest(version=1, bucket_nbytes=(64,), tensors=(spec.model_copy(update=wrong),))
    with pytest.raises(InvalidField):
        store.save(Snapshot(manifest, (torch.zeros(64, dtype=torch.uint8),)))
    assert os.listdir(tmp_path / "versions") == [".lock"]


# --- who may do what when -------------------------------------------------------------------------------------------


def test_old_versions_go_but_not_those_that_are_pinned_or_read(store: SnapshotStore, tmp_path: Path) -> None:
    for version in (1, 2):
        store.save(snapshot(version))
    store.pin(1)
    with store.load(2) as found:
        for version in (3, 4, 5):
            store.save(snapshot(version))
        assert store.versions() == [1, 2, 4, 5]
        assert store.pinned() == {1}
        found.verify()
    assert store.collect() == [2]
    store.unpin(1)
    store.unpin(1)
    assert store.collect() == [1]
    assert check_versions(store, tmp_path / "versions") == [4, 5]
    assert leftovers(tmp_path / "versions") == []


def test_a_version_below_the_others_stays_until_the_next(store: SnapshotStore) -> None:
    for version in (8, 9):
        store.save(snapshot(version))
    store.save(snapshot(1))  # a pool that began again
    assert store.versions() == [1, 8, 9]
    assert store.collect() == [1]


def test_what_is_not_there(store: SnapshotStore, tmp_path: Path) -> None:
    assert (store.versions(), store.pinned(), store.collect()) == ([], set(), [])
    for ask in (store.load, lambda: store.load(7), lambda: store.pin(7)):
        with pytest.raises(NoSuchSnapshot):
            ask()
    for wrong in (-1, 10**12, True, "1"):
        with pytest.raises(InvalidField, match="version"):
            store.load(wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidField, match="keep"):
        SnapshotStore(tmp_path, keep=0)
    store.save(snapshot(1))
    with pytest.raises(NoSuchSnapshot):
        store.pin(2)


def test_names_that_are_no_versions(store: SnapshotStore, tmp_path: Path) -> None:
    store.save(snapshot(1))
    folder = tmp_path / "versions"
    shutil.copytree(folder_of(store), tmp_path / "copy")
    (folder / "v000000000002").symlink_to(tmp_path / "copy")
    (folder / "v000000000003").mkdir()
    (folder / "v4").mkdir()
    (folder / "v000000000005").write_text("x")
    assert store.versions() == [1]
    with pytest.raises(BrokenSnapshot):
        store.load(2)
    with pytest.raises(NoSuchSnapshot):
        store.load(3)
    with pytest.raises(SnapshotError, match="is in the way"):
        store.save(snapshot(3))
    assert leftovers(folder) == []


def test_what_a_live_writer_writes_is_not_taken_away(store: SnapshotStore, tmp_path: Path) -> None:
    with store.draft(1) as draft:
        (draft.path / "model").write_text("half")
        other = SnapshotStore(tmp_path / "versions")
        other.save(snapshot(2))
        assert other.collect() == []
        assert (draft.path / "model").read_text() == "half"
    assert leftovers(tmp_path / "versions") == []


def test_nobody_waits_for_ever_for_a_lock(
    store: SnapshotStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = store.save(snapshot(1))
    monkeypatch.setattr(disk_folder, "LOCK_TIMEOUT_S", 0.05)
    with open(tmp_path / "versions" / ".lock", "rb+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        for ask in (lambda: store.save(snapshot(2)), store.collect, lambda: store.pin(1)):
            with pytest.raises(SnapshotError, match="locked by another process"):
                ask()
    with open(path / "rolloutmq.json", "rb+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(SnapshotError, match="locked by another process"):
            store.load(1)
    assert check_versions(store, tmp_path / "versions") == [1]


def test_listing_and_collecting_need_no_torch(store: SnapshotStore, tmp_path: Path) -> None:
    for version in (1, 2):
        store.save(snapshot(version))
    script = (
        "import sys; sys.modules['torch'] = None\n"
        "from rolloutmq.sync.disk.store import SnapshotStore\n"
        f"store = SnapshotStore({str(tmp_path / 'versions')!r}, keep=1)\n"
        "print(store.versions(), store.load().manifest.version, store.collect())"
    )
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert shown.stdout == "[1, 2] 2 [1]\n", shown.stderr


def test_transformers_loads_it(tmp_path: Path) -> None:
    prepare_transformers()
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415

    write_tiny_model(tmp_path / "tiny")
    weights = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "tiny").named_parameters())
    trained = {name: tensor.detach() + 1 for name, tensor in weights.items()}
    store = SnapshotStore(tmp_path / "versions", base=tmp_path / "tiny", file_bytes=100_000)
    path = store.save(PackedWeights(1, trained.items()).snapshot())
    loaded = dict(AutoModelForCausalLM.from_pretrained(path).named_parameters())
    assert {name: bits(tensor.detach()) for name, tensor in loaded.items()} == {n: bits(t) for n, t in trained.items()}
    assert AutoTokenizer.from_pretrained(path).encode("a") == AutoTokenizer.from_pretrained(tmp_path / "tiny").encode(
        "a"
    )
