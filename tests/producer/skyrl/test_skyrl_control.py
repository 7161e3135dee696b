"""Memory, caches, disk, profiles, facts and tasks of a pool through the facade; and what a pool cannot do."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support.pools.commanded import hurry
from support.pools.pool import eventually, worker
from support.pools.skyrl import check_output, engine, joined
from support.pools.skyrl_trainer import NAMES, adapter, request, weights

from rolloutmq.messages import Broker, InvalidField
from rolloutmq.messages.errors import FeatureUnavailable, RequestRefused, RolloutMQError, WaitTimeout
from rolloutmq.producer.inbox import features
from rolloutmq.producer.skyrl import IncompleteWeights, MemoryTag, extras
from rolloutmq.producer.skyrl.control import WorkerControl
from rolloutmq.worker.engine import EngineInfo
from rolloutmq.worker.scripted.engine import ScriptedEngine

PROMPT: Any = {"prompt_token_ids": [[1]], "sampling_params": {"max_tokens": 3}}


async def test_workers_are_read_again_only_when_one_has_come_or_gone(
    redis_db: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(features, "FRESH_S", 0.0)
    read: list[int] = []
    really = Broker.workers

    async def watched(broker: Broker) -> Any:
        read.append(1)
        return await really(broker)

    async with worker(redis_db), engine(redis_db) as it:
        await joined(it)
        monkeypatch.setattr(Broker, "workers", watched)

        async def known(count: int) -> bool:
            it._core._asked_at = float("-inf")  # long ago
            return len(await it._core.workers(fresh=False)) == count

        assert [await known(1) for _ in range(5)] == [True] * 5
        assert len(read) == 1
        async with worker(redis_db):
            await eventually(lambda: known(2))
        await eventually(lambda: known(1))
        assert [await known(1) for _ in range(5)] == [True] * 5
        assert len(read) == 3


async def test_a_colocated_trainers_step(redis_db: str) -> None:
    """Sleep, train, wake the weights, sync, wake the rest, generate: SkyRL's order."""
    async with worker(redis_db) as one, worker(redis_db) as two, engine(redis_db) as it:
        await joined(it, 2)
        for version in (1, 2):
            await it.sleep(level=2)
            assert one.engine.ops.asleep == two.engine.ops.asleep == {"weights", "kv_cache", "cuda_graph"}
            await it.wake_up(tags=["weights"])
            assert one.engine.ops.asleep == {"kv_cache", "cuda_graph"}
            await it.update_named_weights(request(version))
            await it.wake_up(tags=["kv_cache", "cuda_graph"])
            assert not one.engine.ops.asleep
            assert not two.engine.ops.asleep
            output = await it.generate(PROMPT)
            assert output["weight_version"] == str(version)
            check_output(output, [1])


async def test_waking_everything_with_weights_that_came_meanwhile(redis_db: str) -> None:
    async with worker(redis_db) as running, engine(redis_db) as it:
        await joined(it)
        for _ in range(2):
            await it.sleep()
        await it.update_named_weights(request(1))
        for _ in range(2):
            await it.wake_up()
        assert not running.engine.ops.asleep
        assert (await it.generate(PROMPT))["weight_version"] == "1"
        await it.sleep(tags=["weights"])
        assert running.engine.ops.asleep == {"weights"}
        await it.update_named_weights(request(2))
        await it.wake_up(tags=["weights"])
        assert (await it.generate(PROMPT))["weight_version"] == "2"
        await it.sleep_weights_only()
        assert running.engine.ops.asleep == set(MemoryTag.TRAINING_DEFAULT)
        await it.sleep_all()
        assert running.engine.ops.asleep == set(MemoryTag.ALL)
        await it.update_named_weights(request(3))
        await it.wake_up_weights_only()
        assert running.engine.ops.asleep == {MemoryTag.KV_CACHE, MemoryTag.CUDA_GRAPH}
        await it.wake_up_all()
        assert (await it.generate(PROMPT))["weight_version"] == "3"


async def test_sleep_that_cannot_be(redis_db: str) -> None:
    scripted = ScriptedEngine()
    scripted.ops.can_sleep = False
    async with worker(redis_db, engine=scripted), engine(redis_db) as it:
        await joined(it)
        with pytest.raises(FeatureUnavailable, match="sleep"):
            await it.sleep()
        for wrong in ({"tags": ["kvcache"]}, {"level": 3}, {"timeout": 0}, {"drain_timeout": -1}, {"later": 3}):
            with pytest.raises(InvalidField, match=next(iter(wrong))):
                await it.sleep(**wrong)  # type: ignore[arg-type]
        assert len((await it.generate(PROMPT))["response_ids"]) == 1


async def test_what_was_halted_goes_on_whatever_went_wrong(redis_db: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def late(*_: Any) -> None:
        raise WaitTimeout("one of the workers is slow", "")

    async with worker(redis_db) as running, engine(redis_db) as it:
        await joined(it)
        frozen = running.generation.state.frozen
        with monkeypatch.context() as slowly:
            slowly.setattr(WorkerControl, "done", late)
            with pytest.raises(WaitTimeout):
                await it.pause_generation(mode="in_place")
        assert frozen.holds
        await it.continue_generation()
        assert not frozen.holds
        await it.pause_generation(mode="in_place")
        await it.teardown()
        assert not frozen.holds


async def test_a_pause_that_was_refused_hinders_no_other_one(redis_db: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuses(*_: Any, **__: Any) -> None:
        raise RequestRefused("none here can")

    async with worker(redis_db), engine(redis_db) as it:
        await joined(it)
        monkeypatch.setattr(WorkerControl, "ask", refuses)
        with pytest.raises(RequestRefused):
            await it.pause_generation(mode="in_place")
        await it.pause_generation(mode="abort")


async def test_an_engine_that_ends_says_what_it_leaves_asleep(redis_db: str, caplog: pytest.LogCaptureFixture) -> None:
    async with worker(redis_db), engine(redis_db) as it:
        await joined(it)
        await it.sleep(tags=["weights"])
        await it.teardown()
    assert "workers are left asleep (`rolloutmq control wake`): weights" in caplog.text


async def test_caches(redis_db: str) -> None:
    async with worker(redis_db) as one, worker(redis_db) as two, engine(redis_db) as it:
        await joined(it, 2)
        await it.reset_prefix_cache()
        assert one.engine.ops.flushes == two.engine.ops.flushes == 1
        with pytest.raises(FeatureUnavailable, match="clear_storage"):  # these engines have no such storage
            await it.clear_hicache_storage()


async def test_integrity(redis_db: str) -> None:
    async with worker(redis_db) as one, worker(redis_db) as two, engine(redis_db) as it:
        await joined(it, 2)
        await it.update_named_weights(request(1))
        await it.continue_generation()
        valid = await it.validate_weights()
        assert (valid["valid"], valid["version"]) == (True, "1")
        assert set(valid["workers"]) == {one.id, two.id}
        whole = await it.check_weight_sync_integrity("1")
        assert whole["consistent"]
        assert whole["versions"] == {one.id: "1", two.id: "1"}
        assert not (await it.check_weight_sync_integrity(2))["consistent"]
        two.engine.weights["model.norm"].view(torch.uint8)[0] ^= 1
        broken = await it.check_weight_sync_integrity()
        assert not broken["consistent"]
        assert len(set(broken["fingerprints"].values())) == 2


async def test_nan_inf_and_zeros_are_told_apart_in_all_parameters_or_some(redis_db: str) -> None:
    async with worker(redis_db) as one, engine(redis_db) as it:
        await joined(it)
        await it.update_named_weights(request(1))
        await it.continue_generation()
        bad = {
            "a.nan": [1.0, torch.nan],
            "b.inf": [-torch.inf, 1.0],
            "c.zero": [[0.0], [0.0]],
            "d.both": [torch.nan, torch.inf],
        }
        one.engine.weights = {**one.engine.weights, **{name: torch.tensor(value) for name, value in bad.items()}}
        found = await it.validate_weights()
        assert (found["nan"], found["inf"]) == (["a.nan", "d.both"], ["b.inf", "d.both"])
        assert (found["valid"], found["zero"], found["wrong"]) == (False, ["c.zero"], [])
        some = await it.validate_weights(names=["b.inf", "c.zero", NAMES[0]])
        assert (some["nan"], some["inf"], some["zero"]) == ([], ["b.inf"], ["c.zero"])
        assert (await it.validate_weights(names=NAMES))["valid"]


async def test_the_first_values_of_a_parameter(redis_db: str) -> None:
    async with worker(redis_db), worker(redis_db), engine(redis_db) as it:
        await joined(it, 2)
        await it.update_named_weights(request(1))
        await it.continue_generation()
        name, tensor = next(iter(weights(1).items()))
        assert await it.get_weights_by_name(name) == tensor.tolist()
        assert await it.get_weights_by_name(name, truncate_size=1) == tensor[:1].tolist()
        with pytest.raises(InvalidField, match="strange"):
            await it.get_weights_by_name("strange")
        with pytest.raises(InvalidField, match="truncate_size=0"):
            await it.get_weights_by_name(name, truncate_size=0)


async def test_saving(redis_db: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "SAVE_FOLDER", tmp_path / "kept")
    async with worker(redis_db), worker(redis_db), engine(redis_db) as it:
        await joined(it, 2)
        await it.update_named_weights(request(1))
        await it.continue_generation()
        assert await it.save_remote_model(str(tmp_path / "far"), storage_type="file")
        assert list((tmp_path / "far").rglob("*.safetensors"))
        assert not list((tmp_path / "kept").rglob("*.safetensors"))
        with pytest.raises(FeatureUnavailable, match="save"):  # that is SGLang's own format
            await it.save_sharded_model(str(tmp_path / "sharded"))
        with pytest.raises(InvalidField, match="storage_type="):
            await it.save_remote_model("gs://bucket", storage_type="s3")


async def test_profiles(redis_db: str) -> None:
    async with worker(redis_db) as one, engine(redis_db) as it:
        await joined(it)
        assert await it.start_profile()
        found = await it.stop_profile()
        assert found is not None
        assert set(found) == {one.id}


async def test_facts(redis_db: str) -> None:
    async with worker(redis_db), worker(redis_db), engine(redis_db) as it:
        await joined(it, 2)
        assert (it.tp_size(), it.pp_size(), it.dp_size(), it.ep_size()) == (1, 1, 1, 1)
        assert (it.supports_streaming(), it.supports_sessions(), it.supports_embeddings()) == (True, True, False)


async def test_sizes_are_those_that_workers_report(redis_db: str) -> None:
    class Large(ScriptedEngine):
        @property
        def info(self) -> EngineInfo:
            return replace(super().info, tp_size=4, pp_size=2, dp_size=3, ep_size=2, kv_tokens=1000)

    async with worker(redis_db, engine=Large()), worker(redis_db, engine=Large()), engine(redis_db) as it:
        await joined(it, 2)
        assert (it.tp_size(), it.pp_size(), it.dp_size(), it.ep_size()) == (4, 2, 3, 2)
        assert await it.get_world_size() == (48, 24)
        assert it.get_memory_pool_size() == 2000


async def test_a_pool_without_workers(redis_db: str) -> None:
    async with engine(redis_db) as it:
        for ask in (it.tp_size, it.dp_size, it.get_memory_pool_size):
            with pytest.raises(RolloutMQError, match="no worker"):
                ask()
        for call in (it.start_profile, it.validate_weights, it.check_weight_sync_integrity):
            with pytest.raises(RolloutMQError, match="no worker"):
                await call()  # type: ignore[operator]


async def test_pausing_in_place_and_retracting(redis_db: str) -> None:
    scripted = ScriptedEngine(tokens_per_s=200)
    async with worker(redis_db, engine=scripted) as one, engine(redis_db) as it:
        for mode in ("in_place", "retract"):
            scripted.tokens_per_s = 200
            running = asyncio.create_task(
                it.generate({"prompt_token_ids": [[1]] * 2, "sampling_params": {"max_tokens": 10_000}})
            )
            await eventually(lambda: len(scripted._running) == 2)
            await eventually(lambda: all(scripted._sampled(name) > 1 for name in scripted._running))
            await it.pause_generation(mode)
            assert scripted.ops.frozen == (mode == "in_place")
            later = asyncio.create_task(it.generate(PROMPT))
            await eventually(lambda: len(it._calls.under_way) == 2)
            assert not running.done()
            await it.update_named_weights(request(1))
            await it.continue_generation()
            hurry(one)
            outputs = await asyncio.gather(running, later)
            for output, prompts in zip(outputs, ([1, 1], [1]), strict=True):
                check_output(output, prompts)
                assert set(output["stop_reasons"]) == {"length"}
            assert outputs[0]["weight_version"] == outputs[1]["weight_version"] == await it.get_weight_version()
            assert len(outputs[0]["weight_versions"][0]) == 2  # some of it before, some after
        with pytest.raises(InvalidField, match="mode='later'"):
            await it.pause_generation("later")


async def test_a_sync_that_fails_leaves_a_paused_pool_paused(redis_db: str) -> None:
    scripted = ScriptedEngine()
    async with worker(redis_db, engine=scripted), engine(redis_db) as it:
        await joined(it)
        await it.update_named_weights(request(1))
        await it.pause_generation("in_place")
        await it.update_weight_version(3)  # which an engine that is frozen cannot take: it goes on for that moment
        assert scripted.ops.frozen
        assert await it.get_weight_version() == "3"
        await it.update_named_weights(request(2, NAMES[:1]))
        with pytest.raises(IncompleteWeights):
            await it.update_weight_version(4)
        assert scripted.ops.frozen
        await it.continue_generation()
        assert not scripted.ops.frozen
        assert (await it.generate(PROMPT))["weight_version"] == "3"


async def test_scores_and_embeddings(redis_db: str) -> None:
    scripted = ScriptedEngine()
    async with worker(redis_db, engine=scripted), engine(redis_db) as it:
        await joined(it)
        found = await it.score([[1, 2], [3]], [[4, 5], [6]])
        assert (found["kind"], len(found["scores"])) == ("logprob", 2)
        assert found["scores"] != [0.0, 0.0]
        assert (await it.score([1, 2], [4, 5]))["scores"] == found["scores"][:1]
        with pytest.raises(InvalidField, match="output_ids="):
            await it.score([[1], [2]], [[3]])
        for call in (it.encode(["a"]), it.encode("a"), it.compute_similarity("a", "b")):
            with pytest.raises(FeatureUnavailable, match="embed"):
                await call


async def test_embeddings_and_rewards(redis_db: str) -> None:
    scripted = ScriptedEngine()
    scripted.tasks = frozenset({"task:embed", "task:reward"})

    class Words:
        def encode(self, text: str) -> Any:
            return np.array([ord(char) for char in text], np.int32)

        def encode_chat(self, messages: Any) -> Any:
            raise NotImplementedError

        def decode(self, ids: Any) -> str:
            raise NotImplementedError

    async with worker(redis_db, engine=scripted, tokenizer=Words()), engine(redis_db) as it:  # type: ignore[arg-type]
        await joined(it)
        one, two = await it.encode(["a", "bb"])
        assert [one] == await it.encode("a")
        assert it.supports_embeddings()
        assert await it.encode_single("a", dimensions=2) == one[:2]
        similarity = float(np.dot(one, two) / np.linalg.norm(one) / np.linalg.norm(two))
        assert await it.compute_similarity("a", "bb") == pytest.approx(similarity, abs=1e-6)
        assert await it.compute_similarity("a", "a") == pytest.approx(1.0, abs=1e-6)
        rewards = await it.score([[1], [2]], [[3], [4, 5]])
        assert rewards == {"scores": [2.0, 3.0], "kind": "reward"}  # how many tokens there are, of the whole sequence


async def test_decoding(redis_db: str) -> None:
    async with engine(redis_db) as it:
        assert await it.decode([[1, 0, 2], []]) == ["1 2", ""]
        assert await it.decode([1, 0, 2]) == ["1 2"]
        assert await it.decode(np.array([1, 2])) == ["1 2"]
        for wrong in ("text", [[-1]], [1 << 40], [True]):
            with pytest.raises(InvalidField, match="token_ids="):
                await it.decode(wrong)  # type: ignore[arg-type]


async def test_adapters(redis_db: str, tmp_path: Path) -> None:
    async with worker(redis_db, engine=ScriptedEngine(lora=True)) as running, engine(redis_db) as it:
        await joined(it)
        await it.load_lora_adapter("math", adapter(tmp_path))
        assert ("math", 1) in running.engine.loaded
        output = await it.generate({**PROMPT, "sampling_params": {"max_tokens": 3, "lora": "math"}})
        check_output(output, [1], adapter="math@1")
        await it.load_lora_adapter("math", adapter(tmp_path), pinned=True)
        for _ in range(2):
            await it.load_lora_adapter("math", adapter(tmp_path))
        await eventually(lambda: set(running.engine.loaded) == {("math", 2), ("math", 4)})
        async with worker(redis_db, engine=ScriptedEngine(lora=True)) as late:
            await eventually(lambda: ("math", 4) in late.engine.loaded)
        await it.unload_lora_adapter("math")
        assert not running.engine.loaded


@pytest.mark.parametrize("way", ["load_weights_from_disk", "start_weight_transfer", "overlapped_weight_sync"])
async def test_weights_that_a_halted_pool_cannot_take_are_refused_at_once(
    redis_db: str, tmp_path: Path, way: str
) -> None:
    save_file(weights(1), tmp_path / "model.safetensors")
    given = str(tmp_path) if way == "load_weights_from_disk" else request(1)
    async with worker(redis_db, engine=ScriptedEngine()) as running, engine(redis_db) as it:
        await joined(it)
        await it.pause_generation("in_place")
        with pytest.raises(RequestRefused, match="halted in place"):
            await getattr(it, way)(given)
        assert running.engine.ops.frozen
        await it.continue_generation()
        await getattr(it, way)(given)
