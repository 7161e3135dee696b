"""Weights as a SkyRL trainer sends them, to a pool: collected, published as one version, verified, on every worker."""

from __future__ import annotations

import asyncio
import pickle
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from support.pools import skyrl_trainer
from support.pools.commanded import hurry
from support.pools.pool import Running, eventually, worker
from support.pools.skyrl import check_output, engine, joined
from support.pools.skyrl_trainer import NAMES, SHAPES, request, weights

from rolloutmq import WeightPublisher
from rolloutmq.messages import InvalidField
from rolloutmq.messages.errors import RedisUnavailable, TransferTimeout, WeightSyncError
from rolloutmq.producer.skyrl import IncompleteWeights, SkyRLEngine
from rolloutmq.producer.skyrl.weights import WeightSync
from rolloutmq.worker.scripted.engine import ScriptedEngine

PROMPT: Any = {"prompt_token_ids": [[1, 2]], "sampling_params": {"max_tokens": 4}}


def announced(names: tuple[str, ...] = NAMES) -> dict[str, Any]:
    """Without them: they are broadcast."""
    return {"names": list(names), "dtypes": ["bfloat16"] * len(names), "shapes": [SHAPES[name] for name in names]}


def check_equal(running: Running, seed: int) -> None:
    expected = weights(seed)
    assert set(running.engine.weights) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(running.engine.weights[name].view(tensor.dtype).view(tensor.shape), tensor)


async def version_of(it: SkyRLEngine) -> str | None:
    output = await it.generate(PROMPT)
    check_output(output, [2])
    return output["weight_version"]


class Trainer:
    """The process of tests/support/pools/skyrl_trainer.py."""

    def __init__(self) -> None:
        command = [sys.executable, str(Path(skyrl_trainer.__file__))]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)

    def join(self, name: str, world: int = 2) -> int:
        """Begin to make a group; the port on which it is made."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        self._say(f"join {port} {world} {name}")
        return port

    def send(self, name: str, seed: int) -> None:
        self._say(f"send {name} {seed}")

    async def hear(self, expected: str) -> None:
        assert self.process.stdout is not None
        async with asyncio.timeout(60):
            assert (await asyncio.to_thread(self.process.stdout.readline)).strip() == expected

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def _say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")


@pytest.fixture(scope="module")
def source() -> Iterator[Trainer]:
    """The trainer of most tests: importing torch is what takes longest."""
    started = Trainer()
    yield started
    started.kill()


@dataclass
class BroadcastInitInfo:
    """As SkyRL has it."""

    master_port: int
    master_addr: str = "127.0.0.1"
    rank_offset: int = 1
    world_size: int = 2
    group_name: str = "skyrl"
    backend: str = "gloo"
    model_dtype_str: str = "bfloat16"
    override_existing_receiver: bool = False


@dataclass
class BroadcastWeightUpdateRequest:
    """As newer SkyRL has it."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]] = field(default_factory=list)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["dataclass", "positional", "named"])
async def test_a_trainers_broadcasts_reach_every_worker_as_one_version(
    redis_db: str, source: Trainer, form: str
) -> None:
    """As SkyRL's sender does it: one parameter a request, and the broadcast beside it."""
    async with worker(redis_db) as one, worker(redis_db) as two, engine(redis_db) as it:
        await joined(it, 2)
        assert await version_of(it) == "0"
        info = BroadcastInitInfo(source.join(form, 3), world_size=3, group_name=form)
        fields = ("master_addr", "master_port", "rank_offset", "world_size", "group_name", "backend")
        values = [getattr(info, name) for name in fields]
        if form == "dataclass":
            joining = it.init_weight_update_communicator(info)
        elif form == "positional":
            joining = it.init_weight_update_communicator(*values, override_existing=False)
        else:
            joining = it.init_weight_update_communicator(**dict(zip(fields, values, strict=True)))
        assert (await joining)[0]
        await source.hear("joined")
        for seed in (1, 2):
            source.send(form, seed)
            for name in NAMES:
                if form == "dataclass":
                    await it.update_named_weights(BroadcastWeightUpdateRequest([name], ["bfloat16"], [SHAPES[name]]))
                elif form == "positional":
                    await it.update_named_weights(announced((name,)))
                else:
                    await it.update_named_weights({"names": [name], "dtypes": ["bfloat16"], "shapes": [SHAPES[name]]})
            await source.hear("sent")
            assert await it.get_weight_version() == str(seed - 1)  # nothing is announced before the sync ends
            await it.reset_prefix_cache()
            assert await it.get_weight_version() == str(seed)
            for running in (one, two):
                check_equal(running, seed)
            assert await version_of(it) == str(seed)


async def test_tensors_in_the_request_and_every_way_to_end_a_sync(redis_db: str) -> None:
    async with worker(redis_db) as running, engine(redis_db) as it:
        await it.update_named_weights(request(1))
        assert await version_of(it) == "1"  # the next generate
        await it.update_named_weights(request(2))
        await it.reset_prefix_cache()
        assert await it.get_weight_version() == "2"
        await it.update_named_weights(request(3))
        await it.continue_generation()
        assert await it.get_weight_version() == "3"
        for name in NAMES:
            await it.update_named_weights(request(4, (name,)))
        assert await it.update_weight_version("9") == (True, "")
        assert await version_of(it) == "9"
        check_equal(running, 4)
        await it.update_named_weights(request(5))
        await it.update_named_weights(request(6))  # the same names again: the one before was a version
        assert await it.get_weight_version() == "10"
        check_equal(running, 5)
        assert await version_of(it) == "11"
        check_equal(running, 6)


async def test_a_number_for_the_next_sync(redis_db: str) -> None:
    async with worker(redis_db), engine(redis_db) as it:
        await it.update_weight_version(7)
        assert await it.get_weight_version() == "0"
        await it.update_named_weights(request(1))
        assert await version_of(it) == "7"
        await it.update_weight_version("7")  # it is
        for wrong in ("6", "", "x" * 129, -1, True, 1.5):
            with pytest.raises(InvalidField, match="new_version="):
                await it.update_weight_version(wrong)  # type: ignore[arg-type]


async def test_what_is_given_may_change_at_once(redis_db: str) -> None:
    async with worker(redis_db) as running, engine(redis_db) as it:
        given = request(1)
        await it.update_named_weights(given)
        for tensor in given["tensors"]:
            tensor.zero_()
        assert await version_of(it) == "1"
        check_equal(running, 1)


async def test_what_fails_before_a_version_is_made_costs_no_tensor(
    redis_db: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(*_: Any) -> None:
        raise RedisUnavailable("no Redis")

    async with worker(redis_db), engine(redis_db) as it:
        await joined(it)
        await it.update_named_weights(request(1))
        with monkeypatch.context() as silent:
            silent.setattr(WeightSync, "_checkpoint", away)
            with pytest.raises(RedisUnavailable):
                await it.generate(PROMPT)
        assert await version_of(it) == "1"


async def test_a_sync_without_some_tensors_is_refused_before_anything_is_announced(redis_db: str) -> None:
    async with worker(redis_db) as running, engine(redis_db) as it:
        await it.update_named_weights(request(1))
        assert await version_of(it) == "1"
        await it.update_named_weights(request(2, ("model.norm",)))
        with pytest.raises(
            IncompleteWeights, match=r"2 tensors of the model did not come: lm_head, model\.embed"
        ) as caught:
            await it.reset_prefix_cache()
        assert caught.value.missing == ["lm_head", "model.embed"]
        assert await it.get_weight_version() == "1"
        assert await version_of(it) == "1"  # what had come is dropped
        await it.update_named_weights(request(3))
        assert await version_of(it) == "2"
        check_equal(running, 3)


async def test_the_models_checkpoint_says_what_the_first_version_has(redis_db: str, tmp_path: Path) -> None:
    from safetensors.torch import save_file  # noqa: PLC0415

    save_file(weights(0), tmp_path / "model.safetensors")

    class OnDisk(ScriptedEngine):
        @property
        def info(self) -> Any:
            from dataclasses import replace  # noqa: PLC0415

            return replace(super().info, model=str(tmp_path))

    async with worker(redis_db, engine=OnDisk()), engine(redis_db) as it:
        await it.update_named_weights(request(1, NAMES[:2]))
        with pytest.raises(IncompleteWeights, match="lm_head"):
            await it.reset_prefix_cache()
        await it.update_named_weights(request(1, strange=torch.ones(2)))
        with pytest.raises(WeightSyncError, match="strange"):
            await it.reset_prefix_cache()
        assert await it.get_weight_version() == "0"
        await it.load_weights_from_disk(str(tmp_path))
        assert await it.get_weight_version() == "1"


@pytest.mark.slow
async def test_a_trainer_that_dies_in_the_midst_of_a_sync(redis_db: str, source: Trainer) -> None:
    async with worker(redis_db), engine(redis_db, weights_timeout_s=20.0) as it:
        doomed = Trainer()
        try:
            await it.init_weight_update_communicator(BroadcastInitInfo(doomed.join("skyrl")))
            await doomed.hear("joined")
            receiving = asyncio.create_task(it.update_named_weights(announced()))
            await eventually(it._weights.turn.locked)
        finally:
            doomed.kill()
        with pytest.raises(TransferTimeout, match="skyrl"):
            await receiving
        assert await version_of(it) == "0"
        with pytest.raises(InvalidField, match="init_weight_update_communicator first"):
            await it.update_named_weights(announced())
        info = BroadcastInitInfo(source.join("again"), group_name="again")  # one that starts again
        await it.init_weight_update_communicator(info)
        await source.hear("joined")
        source.send("again", 1)
        await it.update_named_weights(announced())
        await source.hear("sent")
        assert await version_of(it) == "1"


async def test_a_group_that_does_not_come_together(redis_db: str) -> None:
    store = torch.distributed.TCPStore("127.0.0.1", 0, 3, is_master=True, wait_for_workers=False)
    async with engine(redis_db, weights_timeout_s=1.0, receiver_ranks=1) as it:
        with pytest.raises(TransferTimeout, match="ranks 1 to 1 of 3"):
            await it.init_weight_update_communicator(BroadcastInitInfo(store.port, world_size=3))


async def test_two_engines_in_one_group(redis_db: str, source: Trainer) -> None:
    """As SkyRL's client does it with several engines: the second one's ranks come after the first one's."""
    async with (
        worker(redis_db) as here,
        worker(redis_db, pool="other") as there,
        engine(redis_db, receiver_ranks=1) as one,
        engine(redis_db, pool="other", receiver_ranks=1) as two,
    ):
        port = source.join("two", 3)
        infos = [BroadcastInitInfo(port, world_size=3, rank_offset=1 + i, group_name="two") for i in range(2)]
        both = zip((one, two), infos, strict=True)
        await asyncio.gather(*(it.init_weight_update_communicator(info) for it, info in both))
        await source.hear("joined")
        source.send("two", 3)
        await asyncio.gather(*(it.update_named_weights(announced()) for it in (one, two)))
        await source.hear("sent")
        assert [await version_of(it) for it in (one, two)] == ["1", "1"]
        for running in (here, there):
            check_equal(running, 3)


async def test_a_group_of_that_name_is_there(redis_db: str, source: Trainer) -> None:
    async with worker(redis_db), engine(redis_db) as it:
        await it.init_weight_update_communicator(BroadcastInitInfo(source.join("first"), group_name="first"))
        await source.hear("joined")
        with pytest.raises(InvalidField, match="override_existing"):
            await it.init_weight_update_communicator(BroadcastInitInfo(1, group_name="first"))
        info = BroadcastInitInfo(source.join("next"), group_name="next", override_existing_receiver=True)
        await it.init_weight_update_communicator(info)
        await source.hear("joined")
        source.send("next", 1)
        await it.update_named_weights(announced())
        await source.hear("sent")
        assert await version_of(it) == "1"


async def test_overlapped(redis_db: str) -> None:
    scripted = ScriptedEngine(tokens_per_s=200)
    async with worker(redis_db, engine=scripted) as running, engine(redis_db) as it:
        sampling = {"max_tokens": 10_000}  # they run until `hurry`
        task = asyncio.create_task(it.generate({"prompt_token_ids": [[1]] * 4, "sampling_params": sampling}))
        await eventually(lambda: len(scripted._running) == 4)
        handle = await it.start_weight_transfer(request(1))
        assert (handle.is_complete, handle.error) == (False, None)
        assert await it.finish_weight_transfer(handle) == "1"
        assert (handle.is_complete, handle.error) == (True, None)
        assert await it.overlapped_weight_sync(request(2)) == "2"
        hurry(running)
        output = await task
        check_output(output, [1] * 4)
        assert [span["version"] for span in output["weight_versions"][0]] == ["0", "1", "2"]
        assert output["weight_version"] == "2"
        check_equal(running, 2)
        failing = await it.start_weight_transfer(request(3, NAMES[:1]))
        with pytest.raises(IncompleteWeights):
            await failing.wait()
        assert isinstance(failing.error, IncompleteWeights)


async def test_a_publisher_of_ones_own(redis_db: str) -> None:
    publisher = await asyncio.to_thread(lambda: WeightPublisher(redis_url=redis_db, mode="resume"))
    try:
        async with worker(redis_db), engine(redis_db, publisher=publisher) as it:
            with pytest.raises(InvalidField, match=r"pause_mode='in_place'.*mode='in_place', not 'resume'"):
                await it.overlapped_weight_sync(request(1))
            assert await it.overlapped_weight_sync(request(1), pause_mode="retract") == "1"
        assert publisher.last_version == 1
        assert (await asyncio.to_thread(publisher.publish(2, weights(2)).wait, 20)).state == "committed"  # still open
    finally:
        await asyncio.to_thread(publisher.close)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"names": []}, "names="),
        ({"names": ["a", "a", "b"]}, "every name once"),
        ({"dtypes": ["bfloat16"]}, "dtypes="),
        ({"shapes": [[1]] * 3}, "shapes="),
        ({"dtypes": ["float32"] * 3}, "dtypes='float32': bfloat16, which tensor model.embed has"),
        ({"dtypes": ["bytes"] * 3}, "dtypes='bytes'"),
        ({"tensors": []}, "init_weight_update_communicator first"),
        ({"packed": True, "tensors": []}, "packed=True"),
        ({"name_": 1}, "name_=1"),
        ({"tensors": [], "extras": [{"ipc_handles": {}}] * 3}, "CUDA IPC needs a GPU"),
    ],
)
async def test_requests_that_are_wrong(redis_db: str, change: dict[str, Any], message: str) -> None:
    if "GPU" in message and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    async with engine(redis_db) as it:
        with pytest.raises(InvalidField, match=message):
            await it.update_named_weights(request(1) | change)


async def test_no_worker_takes_it(redis_db: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted = ScriptedEngine()

    def refuse(tensors: Any) -> None:
        raise RuntimeError("no room")

    monkeypatch.setattr(scripted, "load_weights", refuse)
    async with worker(redis_db, engine=scripted), engine(redis_db) as it:
        await it.update_named_weights(request(1))
        with pytest.raises(WeightSyncError, match=r"served by nobody.*no room"):
            await it.reset_prefix_cache()


def test_an_engine_is_not_copied() -> None:
    with pytest.raises(TypeError, match="Ray actor"):
        pickle.dumps(SkyRLEngine("redis://nowhere"))
