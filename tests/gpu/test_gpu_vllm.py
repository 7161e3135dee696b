"""A vLLM trainer's NCCL broadcasts, received by a gateway on another GPU: `pytest tests/gpu/test_gpu_vllm.py`."""

from __future__ import annotations

import asyncio
import ctypes
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from support.gateways import gateway
from support.pools.pool import worker
from support.pools.served import port
from support.pools.vllm_trainer import packed, pickled_id

from rolloutmq.ops.gateway.vllm.receiver import ID_BYTES, ID_KEY, InitInfo, _Nccl

pytestmark = [
    pytest.mark.skipif(
        torch.cuda.device_count() < 2, reason="NCCL has one rank a GPU: the trainer's, and the gateway's"
    ),
    pytest.mark.timeout(300),
]
SHAPES = {"embed": (4096, 2048), "norm": (2049,), "empty": (0,), "head": (2048, 4096), "bias": (3,)}
LARGE, SMALL = 1 << 24, 1 << 10
"""Bytes of a matrix, so that the tensor behind it overfills the buffer; and so few that each matrix overfills one."""


def weights(seed: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=draw).to(torch.bfloat16) for name, shape in SHAPES.items()}


def broadcast(at: int, turns: Any) -> None:
    """The trainer's process, as vLLM's engine for weight transfers has it: rank 0, on the first GPU. turns: (seed, size
    of a buffer) of each update, then None."""
    torch.cuda.set_device(0)
    made = (ctypes.c_byte * ID_BYTES)()
    assert ctypes.CDLL("libnccl.so.2").ncclGetUniqueId(ctypes.byref(made)) == 0
    store = torch.distributed.TCPStore("127.0.0.1", at, None, True, timedelta(seconds=60), False, use_libuv=False)
    store.set(ID_KEY, pickled_id(bytes(made)))
    group = _Nccl(bytes(made), InitInfo("127.0.0.1", at, 0, 2, True, ""), torch.device("cuda", 0))
    group.all_reduce(torch.zeros(1, device="cuda"))
    while turn := turns.get(timeout=120):
        for buffer in packed([it.cuda() for it in weights(turn[0]).values() if turn[1] or it.numel()], turn[1]):
            group.broadcast(buffer)


def test_nccl_broadcasts_in_buffers_and_one_by_one(redis_db: str, tmp_path: Path) -> None:
    at, spawn = port(), mp.get_context("spawn")
    turns = spawn.Queue()
    trainer = spawn.Process(target=broadcast, args=(at, turns))
    trainer.start()

    async def run() -> None:
        async with (
            worker(redis_db) as running,
            gateway(redis_db, weights_from=tmp_path, receiver_device="cuda:1") as client,
        ):

            async def done(path: str, **body: Any) -> None:
                answer = await client.post(path, json=body, timeout=120)
                assert answer.status_code == 200, answer.text

            info = {"master_address": "127.0.0.1", "master_port": at, "rank_offset": 1, "world_size": 2}
            await done("/init_weight_transfer_engine", init_info=info)
            for version, most in enumerate((LARGE, SMALL, None), 1):
                turns.put((version, most))
                named = {"names": list(SHAPES), "shapes": [*SHAPES.values()], "dtype_names": ["bfloat16"] * len(SHAPES)}
                buffers = {"packed": True, "packed_buffer_size_bytes": most} if most else {"packed": False}
                await done("/start_weight_update", is_checkpoint_format=True)
                await done("/update_weights", update_info=named | buffers)
                await done("/finish_weight_update")
                assert running.status.version == version
                for name, tensor in weights(version).items():
                    assert torch.equal(running.engine.weights[name].view(tensor.dtype).view(tensor.shape), tensor), name

    try:
        asyncio.run(run())
    finally:
        turns.put(None)
        trainer.join(30)
        trainer.kill()
