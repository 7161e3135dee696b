"""A SkyRL trainer's CUDA IPC handles and NCCL broadcasts through the facade: `pytest tests/gpu/test_gpu_skyrl.py`."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from support.pools.pool import worker
from support.pools.skyrl import engine
from support.pools.skyrl_trainer import NAMES, SHAPES, weights

from rolloutmq.worker.scripted.engine import ScriptedEngine

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="takes a GPU"),
    pytest.mark.timeout(300),
]
SEED = 3


def check_equal(scripted: ScriptedEngine, seed: int) -> None:
    for name, tensor in weights(seed).items():
        assert torch.equal(scripted.weights[name].view(tensor.dtype).view(tensor.shape), tensor)


def hand_over(packed: bool, handles: Any, done: Any) -> None:
    """The trainer's process: tensors on its GPU, their handles as SkyRL makes them."""
    from torch.multiprocessing.reductions import reduce_tensor  # noqa: PLC0415

    device = torch.device("cuda", 0)
    tensors = [tensor.to(device) for tensor in weights(SEED).values()]
    if packed:
        tensors = [torch.cat([tensor.reshape(-1) for tensor in tensors])]
    uuid = str(torch.cuda.get_device_properties(0).uuid)
    made = [{uuid: reduce_tensor(tensor)} for tensor in tensors]
    torch.cuda.synchronize()
    handles.put(made)
    done.wait(120)


@pytest.mark.parametrize("packed", [False, True])
def test_ipc_handles(redis_db: str, packed: bool) -> None:
    spawn = mp.get_context("spawn")
    handles, done = spawn.Queue(), spawn.Event()
    trainer = spawn.Process(target=hand_over, args=(packed, handles, done))
    trainer.start()

    async def run() -> None:
        made = await asyncio.to_thread(handles.get, True, 120)
        request: dict[str, Any] = {
            "names": list(NAMES),
            "dtypes": ["bfloat16"] * len(NAMES),
            "shapes": [SHAPES[name] for name in NAMES],
            "extras": [{"ipc_handles": one} for one in made],
            "packed": packed,
        }
        if packed:
            request["sizes"] = [torch.Size(SHAPES[name]).numel() for name in NAMES]
        scripted = ScriptedEngine()
        async with worker(redis_db, engine=scripted), engine(redis_db, receiver_device="cuda:0") as it:
            await it.update_named_weights(request)
            await it.reset_prefix_cache()
            assert await it.get_weight_version() == "1"
        check_equal(scripted, SEED)

    try:
        asyncio.run(run())
    finally:
        done.set()
        trainer.join(30)
        trainer.kill()


def broadcast(port: int, sent: Any) -> None:
    """The trainer's process: rank 0 of an NCCL group on the first GPU, as SkyRL makes it."""
    import torch.distributed as dist  # noqa: PLC0415
    from support.pools.skyrl_trainer import update_group  # noqa: PLC0415

    torch.cuda.set_device(0)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = update_group(port, 2, "skyrl", "nccl")
    for tensor in weights(SEED).values():
        dist.broadcast(tensor.cuda(), 0, group=group)
    torch.cuda.synchronize()
    sent.wait(120)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL has one rank a GPU: the trainer's, and this process's")
def test_nccl_broadcasts(redis_db: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    spawn = mp.get_context("spawn")
    over = spawn.Event()
    trainer = spawn.Process(target=broadcast, args=(port, over))
    trainer.start()

    async def run() -> None:
        scripted = ScriptedEngine()
        async with worker(redis_db, engine=scripted), engine(redis_db, receiver_device="cuda:1") as it:
            await it.init_weight_update_communicator("127.0.0.1", port, 1, 2, "skyrl", "nccl")
            for name in NAMES:
                await it.update_named_weights({"names": [name], "dtypes": ["bfloat16"], "shapes": [SHAPES[name]]})
            assert (await it.update_weight_version("5"))[0]
            assert await it.get_weight_version() == "5"
        check_equal(scripted, SEED)

    try:
        asyncio.run(run())
    finally:
        over.set()
        trainer.join(30)
        trainer.kill()
