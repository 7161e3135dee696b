"""Commands about weights in a pool with a trainer: asleep, saved, loaded, renamed, looked at bit by bit."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path

import fsspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.peers.publishing import WEIGHTS, publish, publisher
from support.pools.pool import check_scripted, eventually, wait_replies, worker
from support.specimens.messages import SHORT, job

from rolloutmq.messages import Broker, RolloutResult, SamplingParams
from rolloutmq.messages.errors import ConfigError, InvalidField
from rolloutmq.messages.remote import open_url
from rolloutmq.producer.control import PoolControl
from rolloutmq.sync.disk.checkpoint import Checkpoint, checkpoint_format
from rolloutmq.sync.disk.errors import NoSuchSnapshot
from rolloutmq.sync.disk.store import SnapshotStore
from rolloutmq.worker.commands.files import UploadFailed, upload
from rolloutmq.worker.scripted.engine import ScriptedEngine


@pytest.fixture
async def control(redis_db: str) -> AsyncIterator[PoolControl]:
    async with PoolControl(redis_db) as opened:
        yield opened


async def outcomes(broker: Broker, count: int) -> list[RolloutResult]:
    found = [reply.outcome for reply in await wait_replies(broker, count)]
    for each in found:
        check_scripted(each, 3)
    return found  # type: ignore[return-value]


# --- asleep ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "orders", [(["weights"], ["kv_cache", "cuda_graph"]), (["cuda_graph", "weights"], ["kv_cache"]), (["weights"], [])]
)
async def test_an_update_while_asleep_waits_until_the_weights_are_awake_and_goes_before_serving(
    orders: tuple[list[str], list[str]], redis_db: str, broker: Broker, control: PoolControl
) -> None:
    """Requests in flight at the sleep, a version published while everything sleeps: no token of neither-nor weights."""
    async with (
        publisher(redis_db, join_timeout_s=1.5) as trainer,
        worker(redis_db) as other,
        worker(redis_db, engine=ScriptedEngine(tokens_per_s=200.0), max_running=3) as running,
    ):
        await control.pause("finish", worker_id=other.id)
        assert (await publish(trainer, 1)).state == "committed"
        await broker.enqueue([job(sampling=SamplingParams(max_new_tokens=300)) for _ in range(3)])
        await eventually(lambda: running.generation.running == 3)
        (await control.sleep(worker_id=running.id)).check()
        report = await publish(trainer, 2)
        assert list(report.workers) == [other.id]
        assert "did not answer" in report.failures[running.id]
        first, second = orders
        woken = (await control.wake(first, worker_id=running.id)).check()[running.id].result
        assert (woken["intact"], woken["stale"]) == (False, True)
        await eventually(lambda: running.generation.state.in_service, what="the sync")
        assert running.generation.version == 2
        assert {name: tensor.tolist() for name, tensor in running.engine.weights.items()} == {
            name: tensor.tolist() for name, tensor in WEIGHTS.items()
        }
        if running.generation.state.sleep.asleep:
            assert running.generation.running == 0
            woken = (await control.wake(second, worker_id=running.id)).check()[running.id].result
        assert (await control.version(worker_id=running.id)).results[running.id]["asleep"] == []
        for result in await outcomes(broker, 3):
            assert set(result.versions) <= {1, 2}
            assert result.versions[-1] == 2
        assert running.engine.starts == 1


async def test_weights_that_woke_as_they_were_serve_at_once(
    redis_db: str, broker: Broker, control: PoolControl
) -> None:
    engine = ScriptedEngine()
    engine.ops.keeps_weights = True
    async with publisher(redis_db) as trainer, worker(redis_db, engine=engine) as running:
        assert (await publish(trainer, 1)).state == "committed"
        (await control.sleep(["weights"])).check()
        woken = (await control.wake()).check()[running.id].result
        assert (woken["intact"], woken["version"], woken["stale"]) == (True, 1, False)
        await broker.enqueue([job(sampling=SHORT)])
        assert [result.versions for result in await outcomes(broker, 1)] == [(1,)]


async def test_weights_of_nobody_are_had_again_by_a_restart(
    redis_db: str, broker: Broker, control: PoolControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Version 0, which the scripted engine has in no folder, and no trainer."""
    async with worker(redis_db) as running:
        monkeypatch.setattr("rolloutmq.worker.engine_state.QUARANTINE_S", 0.2)
        (await control.sleep(["weights"])).check()
        woken = (await control.wake()).check()[running.id].result
        assert woken["stale"]
        await broker.enqueue([job(sampling=SHORT)])
        await eventually(lambda: running.engine.starts == 2)
        assert [result.versions for result in await outcomes(broker, 1)] == [(0,)]


async def test_frozen_in_place_an_update_waits(redis_db: str, broker: Broker, control: PoolControl) -> None:
    engine = ScriptedEngine(tokens_per_s=200.0)
    async with worker(redis_db, engine=engine) as running:
        await broker.enqueue([job(sampling=SamplingParams(max_new_tokens=200))])
        await eventually(lambda: running.generation.running == 1)
        (await control.pause("in_place")).check()
        async with publisher(redis_db, join_timeout_s=0.3) as trainer:
            assert (await publish(trainer, 1)).state != "committed"
        (await control.resume()).check()
        async with publisher(redis_db) as trainer:
            assert (await publish(trainer, 2)).state == "committed"
        (result,) = await outcomes(broker, 1)
        assert result.versions[-1] in (0, 2)
        assert running.engine.starts == 1


# --- versions and audits ---------------------------------------------------------------------------------------------


async def test_a_version_is_renamed_only_upwards(redis_db: str, broker: Broker, control: PoolControl) -> None:
    async with publisher(redis_db) as trainer, worker(redis_db) as running:
        await publish(trainer, 3)
        for number in (1, 2):
            answer = (await control.set_version(number))[running.id]
            assert (answer.kind, "above 3" in answer.error) == ("InvalidField", True)
        assert (await control.set_version(3)).check()[running.id].result == {"version": 3, "before": 3}
        assert (await control.set_version(7)).check()[running.id].result == {"version": 7, "before": 3}
        assert await control.versions() == {running.id: 7}
        await broker.enqueue([job(sampling=SHORT)])
        assert [result.versions for result in await outcomes(broker, 1)] == [(7,)]


async def test_an_audit_names_what_is_wrong_and_where(redis_db: str, control: PoolControl) -> None:
    async with publisher(redis_db) as trainer, worker(redis_db) as one, worker(redis_db) as other:
        assert (await publish(trainer, 1)).state == "committed"
        found = await control.audit()
        assert found.clean
        assert {result["compared"] for result in found.answers.results.values()} == {3}
        with torch.no_grad():
            one.engine.weights["first"][3] = 77.0
        found = await control.audit()
        assert not found.clean
        assert found.answers[one.id].result["wrong"] == ["first"]
        assert found.answers[other.id].result["clean"]
        assert found.apart == (tuple(sorted((one.id, other.id))),)
        with torch.no_grad():
            one.engine.weights["first"][3] = float("nan")
            one.engine.weights = {
                **one.engine.weights,
                "fourth": torch.zeros(2, 2),
                "fifth": torch.full((3,), torch.inf),
            }
        result = (await control.audit()).answers[one.id].result
        assert (result["nan"], result["inf"], result["zero"]) == (["first"], ["fifth"], ["fourth"])
        assert (await control.audit(only=["second"])).answers[one.id].result["clean"]
        shown = (await control.parameter("first", truncate_size=2)).results[other.id]
        assert (shown["values"], shown["version"]) == (other.engine.weights["first"][:2].tolist(), 1)
        assert (await control.parameter("sixth"))[one.id].kind == "InvalidField"
        await control.pause("finish", worker_id=other.id)
        (await control.set_version(9, worker_id=other.id)).check()
        assert not (await control.audit(worker_id=other.id)).answers[other.id].result["compared"]


# --- to disk and back ------------------------------------------------------------------------------------------------


async def test_a_version_is_saved_copied_away_and_loaded_under_another_number(
    redis_db: str, broker: Broker, control: PoolControl, tmp_path: Path
) -> None:
    away = f"memory://away/{tmp_path.name}"
    async with publisher(redis_db) as trainer, worker(redis_db) as one, worker(redis_db) as other:
        assert (await publish(trainer, 1)).state == "committed"
        saved = (await control.save(str(tmp_path), upload=away, worker_id=one.id)).check()[one.id].result
        folder = Path(saved["path"])
        assert (folder.name, saved["version"], saved["uploaded"]) == ("v000000000001", 1, f"{away}/v000000000001")
        with SnapshotStore(tmp_path).load(1) as written:
            written.verify()
        copied = fsspec.filesystem("memory").find(f"/away/{tmp_path.name}")
        assert len(copied) == saved["uploaded_files"] == len(os.listdir(folder))
        again = (await control.load(str(folder), 1))[one.id]
        assert (again.kind, "above 1" in again.error) == ("InvalidField", True)
        loaded = (await control.load(str(folder), 5)).check()
        assert loaded[other.id].result["version"] == 5
        assert await control.versions() == {one.id: 5, other.id: 5}
        assert (await control.audit()).clean
        await broker.enqueue([job(sampling=SHORT)])
        assert [result.versions for result in await outcomes(broker, 1)] == [(5,)]
        assert (await publish(trainer, 6)).state == "committed"
        assert await control.versions() == {one.id: 6, other.id: 6}


async def test_a_plain_checkpoint_is_loaded_and_broken_ones_are_refused(
    redis_db: str, broker: Broker, control: PoolControl, tmp_path: Path
) -> None:
    good, bad, pickled = tmp_path / "good", tmp_path / "bad", tmp_path / "pickled"
    for folder in (good, bad, pickled):
        folder.mkdir()
    tensors = {"first": torch.arange(10.0) + 5, "second": torch.ones(5)}
    save_file(tensors, good / "model.safetensors")
    save_file({"first": torch.tensor([1.0, float("inf")])}, bad / "model.safetensors")
    (pickled / "pytorch_model.bin").write_bytes(b"x")
    async with worker(redis_db) as running:
        (await control.load(str(good), 4)).check()
        assert running.engine.weights["first"].tolist() == tensors["first"].tolist()
        assert await control.versions() == {running.id: 4}
        for path, why in (
            (bad, "first: has NaN or Inf"),
            (pickled, "may be a pickle"),
            (tmp_path / "nowhere", "is not a folder on this host"),
            (tmp_path, "a snapshot, a safetensors checkpoint"),
        ):
            answer = (await control.load(str(path), 9))[running.id]
            assert not answer.ok
            assert why in answer.error
        answer = (await control.load(str(good), 9, format="snapshot"))[running.id]
        assert "format='snapshot': 'safetensors' or 'auto'" in answer.error
        assert await control.versions() == {running.id: 4}
        (await control.sleep(["weights"])).check()
        for refused in (await control.load(str(good), 9), await control.save(str(tmp_path / "x"))):
            assert refused[running.id].kind == "RequestRefused"


def test_formats_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(NoSuchSnapshot):
        checkpoint_format(tmp_path / "none")
    with pytest.raises(InvalidField, match="a snapshot, a safetensors checkpoint, or a sharded state"):
        checkpoint_format(tmp_path)
    (tmp_path / "model-rank-0-part-0.safetensors").touch()
    assert checkpoint_format(tmp_path) == "sharded"
    other = tmp_path / "v000000000003"
    other.mkdir()
    (other / "x.safetensors").touch()
    assert checkpoint_format(other) == "safetensors"
    (other / "rolloutmq.json").touch()
    assert checkpoint_format(other) == "snapshot"
    renamed = other.rename(tmp_path / "mine")
    with pytest.raises(InvalidField, match="a name like v000000000012"):
        checkpoint_format(renamed)


def test_a_checkpoint_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.arange(4.0), "b": torch.ones(3)}, tmp_path / "one.safetensors")
    save_file({"c": torch.zeros(2)}, tmp_path / "two.safetensors")
    opened = Checkpoint(tmp_path, 3)
    assert {spec.name: tensor.tolist() for spec, tensor in opened} == {
        "a": [0.0, 1.0, 2.0, 3.0],
        "b": [1.0] * 3,
        "c": [0.0] * 2,
    }
    assert opened.manifest.version == 3
    save_file({"c": torch.ones(2)}, tmp_path / "two.safetensors")
    with pytest.raises(Exception, match=r"tensor c in .* has changed"):
        list(opened)


def test_a_weight_map_that_lies_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.arange(4.0)}, tmp_path / "one.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    for told, why in (
        ({"weight_map": {"a": "other.safetensors"}}, "names other.safetensors"),
        ({"weight_map": {"a": "../one.safetensors"}}, "which is not beside it"),
        ([], "not a map of tensors"),
    ):
        index.write_text(json.dumps(told))
        with pytest.raises(Exception, match=why):
            Checkpoint(tmp_path, 1)


def test_uploads_say_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abc")
    target = tmp_path / "target"
    told = upload(tmp_path / "x", f"file://{target}")
    assert (told["uploaded_nbytes"], (target / "x").read_bytes()) == (3, b"abc")
    with pytest.raises(ConfigError, match="upload to nonsense://"):
        open_url("nonsense://where:secret@here", "upload to")
    (tmp_path / "blocked").write_bytes(b"")
    with pytest.raises(UploadFailed):
        upload(tmp_path / "x", f"file://{tmp_path}/blocked/deeper")


async def test_an_upload_that_cannot_be_is_refused_before_anything_is_written(
    redis_db: str, control: PoolControl, tmp_path: Path
) -> None:
    async with publisher(redis_db) as trainer, worker(redis_db) as running:
        await publish(trainer, 1)
        answer = (await control.save(str(tmp_path / "new"), upload="nonsense://x"))[running.id]
        assert (answer.kind, (tmp_path / "new").exists()) == ("ConfigError", False)
        with pytest.raises(InvalidField, match="path"):
            await control.save("relative/path")


# --- adapters and profiles -------------------------------------------------------------------------------------------


def peft(folder: Path, rank: int = 2) -> Path:
    """An adapter as PEFT saves it."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    base = "base_model.model.layers.0.q_proj"
    save_file(
        {f"{base}.lora_A.weight": torch.ones(rank, 4), f"{base}.lora_B.weight": torch.ones(6, rank)},
        folder / "adapter_model.safetensors",
    )
    return folder


async def test_adapters_come_from_a_folder_stay_while_they_are_used_or_pinned_and_go(
    redis_db: str, broker: Broker, control: PoolControl, tmp_path: Path
) -> None:
    folder = str(peft(tmp_path / "adapter"))
    engine = ScriptedEngine(tokens_per_s=200.0, lora=True)
    async with worker(redis_db, engine=engine) as running:
        assert (await control.adapters()).results[running.id] == {"enabled": True, "adapters": {}, "pinned": []}
        (await control.load_adapter("a", 1, folder)).check()
        (await control.load_adapter("a", 2, folder, pinned=False)).check()
        listed = (await control.adapters()).results[running.id]
        assert (listed["adapters"], listed["pinned"]) == ({"a": [1, 2]}, ["a@1"])
        assert load_file(Path(folder) / "adapter_model.safetensors").keys() == engine.loaded["a", 2].tensors.keys()
        using = job(lora="a", sampling=SamplingParams(max_new_tokens=100))
        await broker.enqueue([using])
        await eventually(lambda: running.generation.running == 1)
        answer = (await control.unload_adapter("a"))[running.id]
        assert (answer.kind, "samples use a@2" in answer.error) == ("RequestRefused", True)
        (reply,) = await wait_replies(broker, 1)
        assert reply.outcome.adapter_version == 2
        await asyncio.sleep(0)
        del reply

        async def unloaded() -> bool:
            return (await control.unload_adapter("a")).ok

        await eventually(unloaded)  # as soon as the sample is forgotten
        assert (await control.adapters()).results[running.id]["adapters"] == {}
        answer = (await control.unload_adapter("a"))[running.id]
        assert "an adapter, and version, that this worker has: none" in answer.error


async def test_adapters_are_refused_where_there_are_none(redis_db: str, control: PoolControl, tmp_path: Path) -> None:
    async with worker(redis_db) as running:
        answer = (await control.load_adapter("a", 1, str(peft(tmp_path / "adapter"))))[running.id]
        assert (answer.kind, "max-lora-rank" in answer.error) == ("RequestRefused", True)
    async with worker(redis_db, engine=ScriptedEngine(lora=True)) as running:
        for path, why in ((tmp_path, "PEFT's save_pretrained writes"), (tmp_path / "nothing", "is not there")):
            answer = (await control.load_adapter("a", 1, str(path)))[running.id]
            assert why in answer.error


async def test_a_profile_is_started_stopped_and_fetched(redis_db: str, control: PoolControl, tmp_path: Path) -> None:
    async with worker(redis_db) as running:
        assert (await control.stop_profile())[running.id].kind == "RequestRefused"
        (await control.start_profile(str(tmp_path / "traces"), activities=["CPU"])).check()
        stopped = (await control.stop_profile(fetch_bytes=1 << 20, upload=f"file://{tmp_path}/away")).check()
        result = stopped[running.id].result
        ((name, size),) = result["files"].items()
        assert len(result["fetched"][name]) == size > 0
        assert (tmp_path / "away" / "traces" / name).stat().st_size == size
