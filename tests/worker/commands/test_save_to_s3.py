"""Weights that a worker saves to a store that speaks S3 over HTTP, and stores that refuse them."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from support.peers.publishing import WEIGHTS, publish, publisher
from support.pools.pool import worker
from support.s3 import BUCKET, Store, s3_server

from rolloutmq.messages.errors import ConfigError, InvalidField
from rolloutmq.messages.model import check_params
from rolloutmq.producer.control import PoolControl
from rolloutmq.sync.disk.export import export_version
from rolloutmq.sync.disk.store import SnapshotStore

URL = f"s3://{BUCKET}/runs/one"


@pytest.fixture
def store() -> Iterator[Store]:
    with s3_server() as running:
        yield running


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"pattern": "model-{rank}.safetensors"}, "a file name with {rank} and {part}"),
        ({"pattern": "{rank}{part}.safetensors"}, "apart from each other"),
        ({"pattern": "{rank}-{rank}.safetensors"}, "a file name with {rank} and {part}"),
        ({"pattern": "../{rank}-{part}.safetensors"}, "a file name"),
        ({"pattern": "{rank}-{part:02d}.safetensors"}, "a file name"),
        ({"pattern": "{rank}-{part}.bin"}, "ends in .safetensors"),
        ({"pattern": "{rank}-{part}.safetensors", "format": "safetensors"}, "format 'sharded'"),
        ({"max_size": 65535}, "65536"),
    ],
)
def test_names_and_sizes_of_files_that_cannot_be(how: dict[str, object], why: str) -> None:
    with pytest.raises(InvalidField) as refused:
        check_params("save", {"path": "/there", "format": "sharded"} | how)
    assert why in str(refused.value)
    assert next(iter(how)) in str(refused.value)


async def test_a_version_goes_there_and_comes_back_bit_by_bit(
    redis_db: str, control: PoolControl, store: Store, tmp_path: Path
) -> None:
    async with publisher(redis_db) as trainer, worker(redis_db) as running:
        assert (await publish(trainer, 1)).state == "committed"
        saved = (await control.save(str(tmp_path / "here"), upload=URL)).check()[running.id].result
        assert saved["uploaded"] == f"{URL}/v000000000001"
        names = {name.rpartition("/")[2]: store.files().size(name) for name in store.files().find(URL)}
        assert names == {file.name: file.stat().st_size for file in os.scandir(saved["path"])}
        assert saved["uploaded_nbytes"] == sum(names.values())
        back = tmp_path / "back" / "v000000000001"
        store.files().get(saved["uploaded"], str(back), recursive=True)
        with SnapshotStore(back.parent).load(1) as version:
            version.verify()
            assert not export_version(version, URL)  # it is there
            assert export_version(version, f"s3://{BUCKET}/copies")
            with pytest.raises(ConfigError, match="weihgts: FileNotFoundError"):
                export_version(version, "s3://weihgts/copies")
        (await control.load(str(back), 5)).check()
        assert {name: tensor.tolist() for name, tensor in running.engine.weights.items()} == {
            name: tensor.tolist() for name, tensor in WEIGHTS.items()
        }


async def test_a_store_that_refuses_is_named_with_its_reason_and_what_is_here_stays(
    redis_db: str, control: PoolControl, store: Store, tmp_path: Path
) -> None:
    reader, owner = store.account("s3:ListBucket", "s3:HeadBucket"), store.account("s3:*")
    store.lock()
    async with publisher(redis_db) as trainer, worker(redis_db) as running:
        assert (await publish(trainer, 1)).state == "committed"
        for keys, url, why in (
            (owner, "s3://weihgts/runs", "weihgts: FileNotFoundError: "),  # and it is not made
            (("nobody", "secret"), URL, "PermissionError: "),
            ((owner[0], "secret"), URL, "PermissionError: "),
        ):
            store.use(*keys)
            answer = (await control.save(str(tmp_path / "none"), upload=url))[running.id]
            assert (answer.kind, (tmp_path / "none").exists()) == ("ConfigError", False), answer
            assert f"upload to {url}: " in answer.error
            assert why in answer.error
        store.use(*reader)
        answer = (await control.save(str(tmp_path / "here"), upload=URL))[running.id]
        path = tmp_path / "here" / "v000000000001"
        assert answer.kind == "UploadFailed"
        assert answer.error.startswith(f"upload to {URL}: PermissionError: ")
        assert answer.error.endswith(f"The files are still in {path}")
        with SnapshotStore(path.parent).load(1) as version:
            version.verify()
        store.use(*owner)
        assert store.files().ls("") == [BUCKET]
        assert (await control.save(str(tmp_path / "here"), upload=URL)).ok


async def test_a_store_that_does_not_answer_is_given_up_when_its_filesystem_says_so(
    redis_db: str, control: PoolControl, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = {"config_kwargs": {"read_timeout": 0.2, "retries": {"max_attempts": 0}}}  # as $FSSPEC_S3 would have it
    monkeypatch.setitem(fsspec.config.conf, "s3", told)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        store.use("anybody", "anybody")
        async with publisher(redis_db) as trainer, worker(redis_db) as running:
            assert (await publish(trainer, 1)).state == "committed"
            answer = (await control.save(str(tmp_path / "none"), upload=URL))[running.id]
            assert (answer.kind, f"upload to {URL}: " in answer.error) == ("ConfigError", True), answer
            assert "imeout" in answer.error
            assert running.engine.starts == 1
