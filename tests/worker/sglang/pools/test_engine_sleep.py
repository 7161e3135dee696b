"""Sleep and wake of a real SGLang engine on a CPU, whose memory saver is a stand-in that keeps or spoils the weights.

What is real: requests that are interrupted, the wait for an idle scheduler, digests of the parameters before and after,
the way back to a whole version, updates. What is not is the memory: see tests/gpu/test_gpu_sleep.py.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from support.pools.gpu import Pool, running

from rolloutmq.ops.tiny_model import write_tiny_model
from rolloutmq.worker.sglang import operations

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(300)]
LONG = 1500


class StandIn:
    """For SGLang's memory saver. spoil: a sharded state that woken weights are replaced with, or None."""

    def __init__(self, pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
        self.spoil: str | None = None
        self._run = pool.engine._run
        monkeypatch.setattr(operations, "_check_memory", lambda run, info: None)
        monkeypatch.setattr(self._run.manager, "release_memory_occupation", self._release)
        monkeypatch.setattr(self._run.manager, "resume_memory_occupation", self._resume)

    async def _release(self, request: Any) -> None:
        """Nothing is given up."""

    async def _resume(self, request: Any) -> None:
        if self.spoil is not None and "weights" in request.tags:
            await self._run.channel.operate(0, "load_sharded", path=self.spoil)


async def _spoiled(pool: Pool, folder: Path) -> str:
    """Other weights of the same engine, as a sharded state."""
    from safetensors.torch import load_file, save_file  # noqa: PLC0415

    saved = Path(str((await pool.tell(pool.control.save(str(folder), format="sharded")))["path"]))
    for file in await asyncio.to_thread(lambda: list(saved.glob("*"))):
        if file.suffix == ".safetensors":
            save_file({name: tensor * 0.5 for name, tensor in load_file(file).items()}, file)
        else:
            file.unlink()  # the digests
    return str(saved)


async def _scenario(pool: Pool, memory: StandIn, tensors: dict[str, Any], folder: Path) -> None:
    expected = (await pool.generate(100)).token_ids.tolist()
    memory.spoil = await _spoiled(pool, folder)

    # The model from disk: woken weights are not what they were, and are read again before anything is sampled.
    flying = await pool.fly(LONG)
    assert (await pool.tell(pool.control.sleep()))["asleep"] == ["cuda_graph", "kv_cache", "weights"]
    assert pool.worker.vitals.generation.running == 0
    woken = await pool.tell(pool.control.wake())
    assert (woken["intact"], woken["stale"], woken["version"]) == (False, False, 0)
    (result,) = await pool.client.wait(flying, 60)
    assert (result.versions, result.token_ids.tolist()[:100]) == ((0,), expected)
    assert len(result.token_ids) == LONG

    # A version comes while all sleeps, and again when the weights are awake and the KV cache is not.
    changed = {name: (tensor * 1.25 if tensor.dim() > 1 else tensor) for name, tensor in tensors.items()}
    flying = await pool.fly(LONG)
    await pool.tell(pool.control.sleep())
    report = await asyncio.to_thread(pool.source.publish(1, changed.items()).wait, 60.0)
    assert report.state != "committed"
    await pool.tell(pool.control.wake(["weights"]))
    report = await asyncio.to_thread(pool.source.publish(2, changed.items()).wait, 60.0)
    assert report.state == "committed", report
    assert pool.worker.vitals.generation.running == 0
    await pool.tell(pool.control.wake())
    (result,) = await pool.client.wait(flying, 60)
    assert (result.versions, len(result.token_ids)) == ((0, 2), LONG)
    updated = (await pool.generate(100)).token_ids.tolist()
    assert updated != expected

    # The trainer's version: from the trainer again; or as it was.
    for spoil in (memory.spoil, None):
        memory.spoil = spoil
        await pool.tell(pool.control.sleep(["weights"]))
        woken = await pool.tell(pool.control.wake())
        assert woken["intact"] == (spoil is None)
        result = await pool.generate(100)
        assert (result.versions, result.token_ids.tolist()) == ((2,), updated)
        assert (await pool.control.audit()).clean
    assert pool.worker._keeper.restarts == 0


def test_no_token_of_weights_that_did_not_survive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors.torch import load_file  # noqa: PLC0415

    model = tmp_path / "model"
    write_tiny_model(model, context=2048, dtype="float32")
    tensors: dict[str, Any] = load_file(model / "model.safetensors")

    async def run() -> None:
        async with running(model, dtype="float32", attention_backend=None, max_total_tokens=16384) as pool:
            await _scenario(pool, StandIn(pool, monkeypatch), tensors, tmp_path / "spoiled")

    asyncio.run(run())
