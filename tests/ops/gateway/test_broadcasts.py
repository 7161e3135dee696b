"""What trainers broadcast, received by a gateway: SGLang's groups, vLLM's packed buffers, and ids that are pickles."""

from __future__ import annotations

import asyncio
import base64
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from support.gateways import gateway
from support.keys import bearer, keys_file
from support.pools import skyrl_trainer
from support.pools.pool import Running, eventually, worker
from support.pools.served import port
from support.pools.skyrl_trainer import SHAPES, weights
from support.pools.vllm_trainer import packed, pickled_id
from torch.distributed import AllreduceOptions, BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore

from rolloutmq.messages.errors import InvalidField, RedisUnavailable
from rolloutmq.ops.gateway.facts import PoolFacts
from rolloutmq.ops.gateway.vllm.receiver import Receiver, flushed, read_info, read_init, unique_id

ASKED = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 4}}
NAMED = {"names": list(SHAPES), "shapes": list(SHAPES.values())}


async def done(client: httpx.AsyncClient, path: str, body: Any = None) -> dict[str, Any]:
    answer = await client.post(path, json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def check_served(running: Running, version: int, seed: int) -> None:
    assert running.status.version == version
    for name, tensor in weights(seed).items():
        assert torch.equal(running.engine.weights[name].view(tensor.dtype).view(tensor.shape), tensor)


# --- SGLang's --------------------------------------------------------------------------------------------------------


@contextmanager
def trainer() -> Iterator[Callable[[str, str], None]]:
    """The process of tests/support/pools/skyrl_trainer.py: tell(line, answer)."""
    command = [sys.executable, str(Path(skyrl_trainer.__file__))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield lambda line, answer: process.stdin.write(line + "\n") if line else _hears(process, answer)
        process.stdin.close()
        process.wait(30)


def _hears(process: Any, answer: str) -> None:
    assert process.stdout.readline().strip() == answer


async def test_a_group_of_sglangs_with_and_without_an_end(
    redis_db: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """slime and AReaL say neither begin nor end: an update ends when generation continues. An end that fails may be
    asked for again."""

    async def away(*_: Any) -> None:
        raise RedisUnavailable("no Redis")

    def no_room(_: Any) -> None:
        raise RuntimeError("no room")

    async with worker(redis_db) as running, gateway(redis_db, weights_from=tmp_path) as client:
        with trainer() as tell:
            at = port()
            tell(f"join {at} 3 group", "")
            group = {"master_address": "127.0.0.1", "master_port": str(at), "rank_offset": 1, "world_size": 3}
            await done(client, "/init_weights_update_group", group | {"group_name": "group", "backend": "gloo"})
            await asyncio.to_thread(tell, "", "joined")
            update = NAMED | {"dtypes": ["bfloat16"] * 3, "group_name": "group", "flush_cache": False}
            for version, ends in (
                (5, "/continue_generation"),
                (6, "/end_weight_update"),
                (7, "/update_weight_version"),
            ):
                await done(client, "/pause_generation", {"mode": "in_place"})
                if version == 6:
                    await done(client, "/begin_weight_update", {"selector": "all"})
                tell(f"send group {version}", "")
                said = {} if version == 7 else {"weight_version": str(version)}
                await done(client, "/update_weights_from_distributed", update | said)
                await asyncio.to_thread(tell, "", "sent")
                assert running.status.version < version, "it is staged"
                with monkeypatch.context() as silent:
                    silent.setattr(PoolFacts, "read", away)
                    assert (await client.post(ends, json={"abort_all_requests": False})).status_code == 503
                ended = await done(client, ends, {"new_version": "7", "abort_all_requests": False})
                assert ended.get("weight_version", str(version)) == str(version)
                await done(client, "/continue_generation")
                check_served(running, version, version)
            found = await done(client, "/generate", ASKED)
            assert found["meta_info"]["weight_version"] == "7"
            tell("send group 8", "")
            await done(client, "/update_weights_from_distributed", update)
            await asyncio.to_thread(tell, "", "sent")
            with monkeypatch.context() as full:
                full.setattr(running.engine, "load_weights", no_room)
                for told in ("served by nobody", "send it again"):
                    assert told in (await client.post("/continue_generation", json={})).text
            await done(client, "/destroy_weights_update_group", {"group_name": "group"})
            answer = await client.post(
                "/update_weights_from_distributed", json=update | {"load_format": "flattened_bucket"}
            )
            assert answer.status_code == 400


# --- vLLM's ----------------------------------------------------------------------------------------------------------


class Rank0:
    """A trainer's side of vLLM's protocol, over gloo."""

    def __init__(self, at: int) -> None:
        self._at = at
        self._group: Any = None

    def join(self) -> None:
        store = TCPStore("127.0.0.1", self._at, None, True, timedelta(seconds=60), False, use_libuv=False)
        self._store = store
        self._group = ProcessGroupGloo(PrefixStore("gloo/", store), 0, 2, timedelta(seconds=60))
        self._group.allreduce([torch.zeros(1)], AllreduceOptions()).wait()

    def send(self, tensors: list[torch.Tensor], most: int | None) -> None:
        for part in packed(tensors, most):
            self._group.broadcast([part.clone()], BroadcastOptions()).wait()


@pytest.mark.parametrize("most", [None, 1, 100, 1 << 20])
async def test_an_update_of_vllms_is_one_version_when_it_is_finished(
    redis_db: str, tmp_path: Path, most: int | None
) -> None:
    at = port()
    rank0 = Rank0(at)
    joins = threading.Thread(target=rank0.join)
    async with worker(redis_db) as running, gateway(redis_db, weights_from=tmp_path) as client:
        joins.start()
        info = {"master_address": "127.0.0.1", "master_port": at, "rank_offset": 1, "world_size": 2}
        await done(client, "/init_weight_transfer_engine", {"init_info": info | {"packed": most is not None}})
        await asyncio.to_thread(joins.join)
        for version in (1, 2):
            await done(client, "/start_weight_update", {"is_checkpoint_format": True})
            for names in (["model.embed", "model.norm"], ["lm_head"]):
                tensors = [weights(version)[name] for name in names]
                sends = threading.Thread(target=rank0.send, args=[tensors, most])
                sends.start()
                update = {
                    "names": names,
                    "dtype_names": ["bfloat16"] * len(names),
                    "shapes": [SHAPES[it] for it in names],
                }
                update |= {} if most is None else {"packed_buffer_size_bytes": most}
                if version == 1:
                    await done(client, "/update_weights", {"update_info": update})
                else:
                    call = {"method": "update_weights_nccl", "kwargs": {"update_info": update}}
                    await done(client, "/collective_rpc", call)
                await asyncio.to_thread(sends.join)
                assert running.status.version == version - 1, "an update is not finished by its parts"
            if version == 1:
                await done(client, "/finish_weight_update")
            else:
                await done(client, "/collective_rpc", {"method": "skyrl_finish_weight_update"})
            check_served(running, version, version)
        assert (await client.get("/weight_info")).json() == {"weight_version": "2"}
        await done(client, "/shutdown_weight_transfer_engine")
        for body in ({"update_info": NAMED}, {"update_info": 7}, {"update_info": [{"names": ["a"]}]}):
            assert (await client.post("/update_weights", json=body)).status_code == 400
        for method in ("update_weights_ipc", "eval", None, {"a": 1}):
            assert (await client.post("/collective_rpc", json={"method": method})).status_code == 400


async def test_a_gateway_that_waits_for_a_trainer_may_end(
    redis_db: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of its process waits for no thread of these."""
    waiting, came = list[threading.Thread](), threading.Event()

    def join(*_: Any) -> None:
        waiting.append(threading.current_thread())
        came.wait()

    monkeypatch.setattr("rolloutmq.ops.gateway.vllm.receiver.Receiver", join)
    async with gateway(redis_db, weights_from=tmp_path) as client:
        info = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2}
        asked = asyncio.create_task(done(client, "/init_weight_transfer_engine", {"init_info": info}))
        await eventually(lambda: waiting)
        came.set()
        await asked
    assert waiting[0].daemon


async def test_broadcasts_are_for_who_owns_the_pool(redis_db: str, tmp_path: Path) -> None:
    file, keys = keys_file(tmp_path, {"a": ""})
    async with worker(redis_db), gateway(redis_db, keys=file) as client:
        client.headers.update(bearer(keys["a"]))
        for path, body in (
            ("/init_weight_transfer_engine", {"init_info": {}}),
            ("/start_weight_update", {}),
            ("/finish_weight_update", {}),
            ("/update_weights", {"update_info": NAMED}),
            ("/collective_rpc", {"method": "skyrl_start_weight_update"}),
            ("/init_weights_update_group", {}),
            ("/update_weights_from_distributed", NAMED),
            ("/sleep", {}),
        ):
            answer = await client.post(path, json=body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "RouteBlocked"), path


@pytest.mark.parametrize(
    "info",
    [
        None, [], {}, {"master_address": 7}, {"master_address": "h", "master_port": 1, "rank_offset": 1},
        {"master_address": "h", "master_port": 1 << 20, "rank_offset": 1, "world_size": 2},
        {"master_address": "h", "master_port": 1, "rank_offset": 2, "world_size": 2},
        {"master_address": "h", "master_port": 1, "rank_offset": 0, "world_size": 2},
        {"master_address": "h", "nccl_unique_id_b64": "AA", "rank_offset": 1, "world_size": 2},
        {"master_address": "h", "master_port": True, "rank_offset": 1, "world_size": 2},
    ],
)  # fmt: skip
def test_bad_infos_are_refused(info: Any) -> None:
    with pytest.raises(InvalidField):
        read_init(info)


@pytest.mark.parametrize(
    "change",
    [
        {"names": None}, {"names": "abc"}, {"names": ["a", "a"]}, {"shapes": [[-1]] * 3}, {"shapes": [["x"]] * 3},
        {"dtype_names": ["bfloat16"]}, {"packed_buffer_size_bytes": 0}, {"packed_buffer_size_bytes": "1"},
    ],
)  # fmt: skip
def test_bad_updates_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidField):
        read_info(NAMED | {"dtype_names": ["bfloat16"] * 3} | change, True)


def test_a_buffer_is_flushed_after_the_tensor_that_overfills_it() -> None:
    def ends(sizes: list[int], most: int) -> list[tuple[int, int]]:
        return [(it.start, it.stop) for it in flushed(sizes, most)]

    assert ends([4, 4, 4], 8) == [(0, 3)]
    assert ends([4, 4, 4, 1], 8) == [(0, 3), (3, 4)]
    assert ends([9, 1, 9], 8) == [(0, 1), (1, 3)]
    assert ends([0, 0], 8) == [(0, 2)]
    assert ends([], 8) == []


# --- pickles ---------------------------------------------------------------------------------------------------------


def test_an_id_is_read_and_nothing_of_its_pickle_is_run(tmp_path: Path) -> None:
    pickled = pickled_id(bytes(range(128)))
    assert unique_id(pickled) == bytes(range(128))
    touched = tmp_path / "touched"

    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(touched),)

    for bad in (
        pickle.dumps(Evil()), pickle.dumps(bytes(128)[:127]), pickle.dumps(print), pickle.dumps([1]), b"", b"\x80",
        pickled[:-9], pickled.replace(b"ncclUniqueId", b"ncclUniqueIe"), b"x" * 5000, pickle.dumps({"a": Evil()}),
        b"c_ctypes\n_unpickle\n(tR.", b"cos\nsystem\n(S'touch x'\ntR.",
    ):  # fmt: skip
        with pytest.raises(InvalidField):
            unique_id(bad)
    assert not touched.exists()


def test_without_a_gpu_an_id_alone_is_of_no_use() -> None:
    given = base64.b64encode(bytes(128)).decode()
    with pytest.raises(Exception, match="receiver-device"):
        Receiver(read_init({"nccl_unique_id_b64": given, "rank_offset": 1, "world_size": 2}), "cpu")
