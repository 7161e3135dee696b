"""Memory on a GPU: a hierarchical cache is read back under the same weights only, and a full device loses no job."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.pools.gpu import TOLERANCE, running
from support.pools.in_place import Judge
from support.pools.pool import eventually

from rolloutmq.messages import GenerateJob, SamplingParams
from rolloutmq.ops.tiny_model import write_tiny_model

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(600),
]
PAGE = 64
LENGTH, PROMPTS = 16 * PAGE, 16
HOG = """
import sys, torch
torch.zeros(1, device="cuda")
free, _ = torch.cuda.mem_get_info()
kept = torch.empty(free - (8 << 20), dtype=torch.uint8, device="cuda")
print("taken", flush=True)
sys.stdin.read()
"""


def long_job(first: int = 5) -> GenerateJob:
    sampling = SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True)
    return GenerateJob(token_ids=[first, *(5 + i % 250 for i in range(1, LENGTH))], sampling=sampling)


async def _host_memory(model: Path) -> None:
    """What the device has no room for is read back from the host, but never under other weights."""
    hierarchical = {
        "enable_hierarchical_cache": True,
        "hicache_ratio": 8.0,
        "hicache_write_policy": "write_through",
        "page_size": PAGE,
    }
    async with running(model, max_total_tokens=4 * LENGTH, extra=hierarchical) as pool:

        async def cached(job: GenerateJob) -> int:
            (result,) = await pool.client.wait(await pool.client.submit(job), 120)
            return result.cached_tokens

        assert [await cached(job) for job in prompts()] == [0] * PROMPTS
        assert [await cached(job) for job in prompts()] == [LENGTH - PAGE] * PROMPTS
        tensors = load_file(model / "model.safetensors")
        report = await asyncio.to_thread(pool.source.publish(1, tensors.items()).wait, 60.0)
        assert report.state == "committed"
        assert [await cached(job) for job in prompts()] == [0] * PROMPTS
        assert await pool.tell(pool.control.clear_storage()) == {}


def test_prefixes_come_back_from_the_host_under_the_same_weights_only(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    asyncio.run(_host_memory(tmp_path))


async def _no_memory(model: Path) -> None:
    """What it needs for the prefill of 16,000 tokens is not there, and then is."""
    async with running(model, max_total_tokens=40_000) as pool:
        pipe = subprocess.PIPE
        hog = await asyncio.create_subprocess_exec(sys.executable, "-c", HOG, stdin=pipe, stdout=pipe)
        try:
            assert hog.stdout is not None
            assert await hog.stdout.readline() == b"taken\n"
            handles = await pool.client.submit_many(prompts())

            async def without_memory() -> bool:
                (status,) = await pool.client.workers()
                return bool(status.engine_restarts or pool.worker.vitals.generation.slots.retried)

            await eventually(without_memory, 200.0)
        finally:
            await hog.communicate()
        found = [(await pool.client.wait(handle, 240))[0] for handle in handles]
    judge = Judge([model], "cuda")
    for job, result in zip(prompts(), found, strict=True):
        assert len(result.token_ids) == 8
        assert judge.error(list(job.token_ids), result, [(0, 8)]) < TOLERANCE


def prompts() -> list[GenerateJob]:
    """Without a common prefix."""
    return [long_job(first=6 + number) for number in range(PROMPTS)]


def test_a_device_without_memory_loses_no_job(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, width=2048)
    asyncio.run(_no_memory(tmp_path))
