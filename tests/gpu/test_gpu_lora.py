"""LoRA adapters in a real SGLang engine, and transformers with the adapters merged in as the judge of every token.

One GPU: `pytest tests/gpu/test_gpu_lora.py`. The second test needs a redis-server as `rolloutmq redis` finds it.
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.pools.in_place import Judge, greedy, prompts, until
from support.pools.pool import eventually, wait_replies

from rolloutmq import GenerateJob, RolloutResult, WeightPublisher
from rolloutmq.messages import Broker, SamplingParams, Segment, connect
from rolloutmq.messages.errors import EngineError
from rolloutmq.ops.tiny_model import write_tiny_model
from rolloutmq.sync.adapters.format import Adapter, check_config
from rolloutmq.worker.config import WorkerConfig
from rolloutmq.worker.engine.protocol import EngineOutput, EngineRequest
from rolloutmq.worker.sglang.engine import SGLangConfig, SGLangEngine
from rolloutmq.worker.text.tokenizer import NoTokenizer
from rolloutmq.worker.worker import Worker

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(600),
]
TOLERANCE = 0.05
"""Of a log-probability: the engine computes in bfloat16, the reference in float32 on the same bfloat16 values."""
RANK, ALPHA = 8, 16
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SCALE = 0.08
"""Of lora_B: with it an adapter changes each weight by about as much as the weight is."""


def config(modules: tuple[str, ...] = MODULES, rank: int = RANK) -> dict[str, Any]:
    return check_config({"r": rank, "lora_alpha": ALPHA * rank // RANK, "target_modules": list(modules)})


def checkpoint(model: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file  # noqa: PLC0415

    return dict(load_file(model / "model.safetensors"))


def adapter(model: Path, version: int, modules: tuple[str, ...] = MODULES, rank: int = RANK) -> Adapter:
    """Random tensors that PEFT could have made for this model."""
    seeded = torch.Generator().manual_seed(100 * rank + version)
    made = {}
    for name, weight in checkpoint(model).items():
        module = name.removesuffix(".weight")
        if module.endswith(modules):
            outputs, inputs = weight.shape
            a = torch.randn(rank, inputs, generator=seeded) / inputs**0.5
            b = torch.randn(outputs, rank, generator=seeded) * SCALE
            made[f"base_model.model.{module}.lora_A.weight"] = a.bfloat16()
            made[f"base_model.model.{module}.lora_B.weight"] = b.bfloat16()
    return Adapter("math", version, config(modules, rank), made)


def merged(base: dict[str, torch.Tensor], of: Adapter, path: Path) -> Path:
    """The weights W + alpha / r * B A, as a file."""
    from safetensors.torch import save_file  # noqa: PLC0415

    weights = {name: tensor.float() for name, tensor in base.items()}
    for name, a in of.tensors.items():
        if name.endswith(".lora_A.weight"):
            module = name.removesuffix(".lora_A.weight")
            b = of.tensors[f"{module}.lora_B.weight"].float()
            weights[f"{module.removeprefix('base_model.model.')}.weight"] += ALPHA / RANK * b @ a.float()
    save_file(weights, path)
    return path


def engine_config(model: Path, **more: Any) -> SGLangConfig:
    return SGLangConfig(
        model=str(model),
        dtype="bfloat16",
        max_running=16,
        max_total_tokens=200_000,
        attention_backend="triton",
        sampling_backend="pytorch",
        prefill_cuda_graph=False,
        max_lora_rank=RANK,
        max_loras_per_batch=4,
        **more,
    )


def request(prompt: list[int], count: int, version: int) -> EngineRequest:
    """version: of the adapter, 0 for none."""
    plain = greedy(prompt, count, f"0/math@{version}" if version else "0")
    if not version:
        return plain
    return EngineRequest(
        plain.request_id,
        plain.token_ids,
        plain.sampling,
        count,
        plain.cache_key,
        adapter="math",
        adapter_version=version,
    )


async def give(engine: SGLangEngine, one: Adapter) -> None:
    await engine.load_adapter(one)
    engine.info.adapters.add(one.name, one.version)


async def take(engine: SGLangEngine, version: int) -> None:
    """Unload a version; SGLang counts a request that has ended as one that runs a moment longer."""

    async def gone() -> bool:
        try:
            await engine.unload_adapter("math", version)
        except EngineError:
            return False
        return True

    engine.info.adapters.remove("math", version)
    await eventually(gone)


def check(judge: Judge, prompt: list[int], output: Any, version: int, versions: int = 3) -> None:
    """It is what this version gives, and no other."""
    count = len(output.token_ids)
    errors = [judge.error(prompt, output, [(each, count)]) for each in range(versions)]
    assert errors[version] < TOLERANCE, errors
    assert all(error > 3 * TOLERANCE for each, error in enumerate(errors) if each != version), errors


async def _versions(model: Path, judge: Judge, **more: Any) -> None:
    engine = SGLangEngine(engine_config(model, **more))
    await engine.start()
    try:
        assert "lora" in engine.info.features
        await give(engine, adapter(model, 1))
        await engine.load_adapter(adapter(model, 1))  # again, as after a lost answer
        asked = prompts(6)

        async def ask(prompt: list[int], count: int, version: int) -> EngineOutput:
            return await engine.generate(request(prompt, count, version))

        # One batch of both, the same prompts: neither computes with the other's weights or finds the other's prefixes.
        wanted = list(itertools.product(asked, (0, 1)))
        for (prompt, version), output in zip(
            wanted, await asyncio.gather(*(ask(prompt, 48, version) for prompt, version in wanted)), strict=True
        ):
            assert output.cached_tokens == 0
            check(judge, prompt, output, version)

        # In flight across an update: nothing is interrupted, everybody keeps what it began with.
        running = [request(prompt, 1500, version) for prompt, version in wanted[:6]]
        tasks = [asyncio.create_task(engine.generate(one)) for one in running]
        await until(lambda: all((p := engine.progress(one.request_id)) and len(p.token_ids) >= 50 for one in running))
        began = time.monotonic()
        await give(engine, adapter(model, 2))
        print(f"loading an adapter beside {len(running)} requests: {1000 * (time.monotonic() - began):.1f} ms")
        assert not any(task.done() for task in tasks)
        with pytest.raises(EngineError, match="refer"):  # at once: a wait would keep every other adapter out
            await engine.unload_adapter("math", 1)
        fresh = await asyncio.gather(*(ask(prompt, 48, 2) for prompt in asked))
        assert not any(task.done() for task in tasks)  # so these ran in one batch with them
        for prompt, output in zip(asked, fresh, strict=True):
            assert output.cached_tokens == 0
            check(judge, prompt, output, 2)
        for (prompt, version), output in zip(wanted[:6], await asyncio.gather(*tasks), strict=True):
            assert len(output.token_ids) == 1500
            check(judge, prompt, output, version)

        # The old version goes, and its place in the batch is free again: more versions than slots, one after the other.
        for version in range(3, 9):
            await give(engine, adapter(model, version))
            await ask(asked[0], 4, version)
            await take(engine, version)
        await take(engine, 1)
        with pytest.raises(EngineError, match="math@1"):
            await ask(asked[0], 4, 1)
        again = await ask(asked[0], 48, 2)
        assert again.cached_tokens > 0
        check(judge, asked[0], again, 2)
        check(judge, asked[1], await ask(asked[1], 48, 0), 0)

        # What does not fit is refused, and the engine lives.
        with pytest.raises(EngineError, match="rank"):
            await engine.load_adapter(adapter(model, 20, rank=2 * RANK))
        bad = adapter(model, 21)
        name = next(name for name in bad.tensors if name.endswith("o_proj.lora_B.weight"))
        bad.tensors[name] = bad.tensors[name][:-1]
        with pytest.raises(EngineError, match="o_proj"):
            await engine.load_adapter(bad)
        check(judge, asked[2], await ask(asked[2], 48, 2), 2)
    finally:
        await engine.close()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_tiny_model(tmp_path / "model", dtype="bfloat16")
    return tmp_path / "model"


@pytest.mark.parametrize("cuda_graph", [True, False])
def test_every_request_runs_with_its_version(model: Path, tmp_path: Path, cuda_graph: bool) -> None:
    base = checkpoint(model)
    files = [merged(base, adapter(model, version), tmp_path / f"merged-{version}.safetensors") for version in (1, 2)]
    asyncio.run(_versions(model, Judge([model, *files], "cuda"), cuda_graph=cuda_graph))


@pytest.mark.parametrize("modules", [("v_proj",), ("k_proj", "up_proj"), ("q_proj", "v_proj"), ("o_proj", "down_proj")])
def test_adapters_of_a_part_of_what_sglang_fuses(model: Path, tmp_path: Path, modules: tuple[str, ...]) -> None:
    part = adapter(model, 1, modules)
    judge = Judge([model, merged(checkpoint(model), part, tmp_path / "merged.safetensors")], "cuda")

    async def run() -> None:
        engine = SGLangEngine(engine_config(model, cuda_graph=False))
        await engine.start()
        try:
            await give(engine, part)
            for prompt in prompts(4):
                output = await engine.generate(request(prompt, 64, 1))
                assert judge.error(prompt, output, [(1, 64)]) < TOLERANCE
                assert judge.error(prompt, output, [(0, 64)]) > 2 * TOLERANCE
        finally:
            await engine.close()

    asyncio.run(run())


# --- a whole pool -------------------------------------------------------------------------------------------------


def job(prompt: list[int], count: int, **fields: Any) -> GenerateJob:
    sampling = SamplingParams(max_new_tokens=count, temperature=0.0, ignore_eos=True)
    return GenerateJob(token_ids=prompt, sampling=sampling, reply_to="client", **fields)


def judged(judge: Judge, prompt: list[int], one: RolloutResult, model: int) -> None:
    error = judge.error(prompt, one, [(model, len(one.token_ids))])  # type: ignore[arg-type]
    assert error < TOLERANCE, (one.segments, one.adapter_segments, error)


class Pool:
    """A worker with a real engine, a publisher, and a client of both."""

    def __init__(self, url: str, model: Path, broker: Broker) -> None:
        self.model, self.broker, self.seen = model, broker, 0
        self.engine = SGLangEngine(engine_config(model))
        self.worker = Worker(WorkerConfig(redis_url=url, max_running=16), self.engine, NoTokenizer())
        self.serving = asyncio.create_task(self.worker.run())
        self.source = WeightPublisher(url)

    async def publish(self, version: int) -> None:
        one = adapter(self.model, version)
        on_gpu = {name: tensor.cuda() for name, tensor in one.tensors.items()}
        handle = self.source.publish_adapter("math", version, on_gpu, one.config)
        report = await asyncio.to_thread(handle.wait, 60.0)
        assert (report.state, report.failures) == ("committed", {}), report

    async def answers(self, *jobs: GenerateJob) -> list[RolloutResult]:
        await self.broker.enqueue(jobs)
        self.seen += len(jobs)
        found = [reply.outcome for reply in await wait_replies(self.broker, self.seen, timeout=240.0)]
        assert all(isinstance(one, RolloutResult) for one in found), found
        by_id = {one.job_id: one for one in found}
        return [by_id[one.id] for one in jobs]  # type: ignore[misc]

    async def close(self) -> None:
        self.worker.drain()
        await asyncio.gather(self.serving, return_exceptions=True)
        await asyncio.to_thread(self.source.close)


async def _pool(pool: Pool, judge: Judge, newer: dict[str, torch.Tensor]) -> None:
    """judge's models: base, base with adapter 1, with 2, newer weights, newer weights with adapter 2."""
    prompt, worker = prompts(1)[0], pool.worker
    await eventually(lambda: worker.joined.is_set() or pool.serving.done(), timeout=300.0)
    await pool.publish(1)
    plain, first = await pool.answers(job(prompt, 64), job(prompt, 64, lora="math"))
    judged(judge, prompt, plain, 0)
    judged(judge, prompt, first, 1)
    assert (plain.adapter, first.adapter, first.adapter_version) == (None, "math", 1)

    # In flight across an update.
    asked = asyncio.create_task(pool.answers(job(prompt, 3000, lora="math"), job(prompt, 3000)))
    await eventually(lambda: worker.vitals.generation.running == 2, timeout=60.0)
    await pool.publish(2)
    assert worker.vitals.generation.running == 2
    flew, flew_plain = await asked
    judged(judge, prompt, flew, 1)
    judged(judge, prompt, flew_plain, 0)
    assert flew.adapter_segments == (Segment(1, 3000),)
    await eventually(lambda: not pool.engine.info.adapters.has("math", 1), timeout=30.0)
    [second] = await pool.answers(job(prompt, 64, lora="math", min_adapter_version=2))
    judged(judge, prompt, second, 2)

    # New weights under an adapter that stays.
    report = await asyncio.to_thread(pool.source.publish(1, newer).wait, 60.0)
    assert report.state == "committed", report
    await _both(pool, judge, prompt)

    # A new engine gets both again.
    [scheduler] = multiprocessing.active_children()
    os.kill(scheduler.pid, signal.SIGKILL)  # type: ignore[arg-type]
    await eventually(lambda: worker._keeper.restarts == 1, timeout=60.0)
    await _both(pool, judge, prompt)


async def _both(pool: Pool, judge: Judge, prompt: list[int]) -> None:
    """The newer weights, alone and with the second adapter."""
    plain, on_top = await pool.answers(job(prompt, 64, min_version=1), job(prompt, 64, lora="math", min_version=1))
    judged(judge, prompt, plain, 3)
    judged(judge, prompt, on_top, 4)
    assert (on_top.versions, on_top.adapter_version) == ((1,), 2)


async def _serve(url: str, model: Path, judge: Judge, newer: dict[str, torch.Tensor]) -> None:
    async with connect(url) as redis:
        pool = Pool(url, model, Broker(redis, "default"))
        try:
            await _pool(pool, judge, newer)
        finally:
            await pool.close()


def test_a_pool_takes_adapters_and_weights(model: Path, tmp_path: Path) -> None:
    from safetensors.torch import save_file  # noqa: PLC0415

    from rolloutmq.ops.redis.embedded import EmbeddedRedis  # noqa: PLC0415

    base = checkpoint(model)
    torch.manual_seed(9)
    newer = {
        name: (t.float() + 0.5 * t.float().std().nan_to_num(1.0) * torch.randn(t.shape)).to(t.dtype)
        for name, t in base.items()
    }
    save_file(newer, tmp_path / "newer.safetensors")
    one, two = adapter(model, 1), adapter(model, 2)
    judge = Judge(
        [
            model,
            merged(base, one, tmp_path / "one.safetensors"),
            merged(base, two, tmp_path / "two.safetensors"),
            tmp_path / "newer.safetensors",
            merged(newer, two, tmp_path / "newer-two.safetensors"),
        ],
        "cuda",
    )
    with EmbeddedRedis() as server:
        asyncio.run(_serve(server.url, model, judge, newer))
