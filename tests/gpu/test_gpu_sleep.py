"""A real engine gives its GPU's memory up and takes it again: in every legal order, with requests and updates.

Once without a copy of sleeping weights, where what wakes is no version, and once with one.
"""

from __future__ import annotations

import asyncio
from itertools import permutations
from pathlib import Path

import pytest
import torch
from support.pools.gpu import Pool, check_greedy, running

from rolloutmq.messages.model.command_params import MEMORY_TAGS
from rolloutmq.ops.tiny_model import write_tiny_model

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(900),
]
KV_TOKENS = 20_000_000
"""Of the tiny model's: gigabytes, so that what is given up can be told from everything else on the GPU."""
GIVEN_UP = 0.8
"""Of the KV cache, at least."""
LONG = 1500


def free() -> int:
    """Bytes that nobody on the GPU has; of the whole device, so other programs must be quiet."""
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


def kv_bytes(model: Path) -> int:
    """Of the whole cache: keys and values, of every layer, in bfloat16."""
    from transformers import AutoConfig  # noqa: PLC0415

    config = AutoConfig.from_pretrained(model)
    head = config.hidden_size // config.num_attention_heads
    return KV_TOKENS * 2 * config.num_hidden_layers * config.num_key_value_heads * head * 2


async def _sleep_and_wake(pool: Pool, model: Path, keeps: bool) -> None:
    from safetensors.torch import load_file  # noqa: PLC0415

    expected = (await pool.generate(200)).token_ids.tolist()
    kv, before = kv_bytes(model), free()

    # Everything, with a request in flight.
    flying = await pool.fly(LONG)
    asleep = await pool.tell(pool.control.sleep())
    assert asleep["asleep"] == ["cuda_graph", "kv_cache", "weights"]
    assert free() - before > GIVEN_UP * kv
    assert await pool.tell(pool.control.sleep(["kv_cache"])) == asleep
    assert "come first" in await pool.why_not(pool.control.wake(["kv_cache"]))
    assert "asleep" in await pool.why_not(pool.control.flush_cache())
    woken = await pool.tell(pool.control.wake())
    assert woken["intact"] == keeps
    assert (woken["version"], woken["stale"]) == (0, False)  # read from disk again where they were not kept
    assert (await pool.tell(pool.control.wake()))["asleep"] == []
    (result,) = await pool.client.wait(flying, 120)
    assert len(result.token_ids) == LONG
    check_greedy(model, result)
    assert abs(before - free()) < (1 - GIVEN_UP) * kv

    # Every order, one at a time both ways; and only the weights.
    orders = [order for order in permutations(MEMORY_TAGS) if order.index("weights") < order.index("kv_cache")]
    for down, up in zip(permutations(MEMORY_TAGS), orders * 2, strict=True):
        for tag in down:
            await pool.tell(pool.control.sleep([tag]))
        for tag in up:
            await pool.tell(pool.control.wake([tag]))
        assert (await pool.generate(200)).token_ids.tolist() == expected, (down, up)
    await pool.tell(pool.control.sleep(["weights"]))
    await pool.tell(pool.control.wake(["weights"]))
    assert (await pool.generate(200)).token_ids.tolist() == expected

    # A version comes while everything sleeps, and again as soon as the weights are awake: before the KV cache is.
    tensors = load_file(model / "model.safetensors")
    changed = {name: (tensor * 1.25 if tensor.dim() > 1 else tensor) for name, tensor in tensors.items()}
    flying = await pool.fly(LONG)
    await pool.tell(pool.control.sleep())
    report = await asyncio.to_thread(pool.source.publish(1, changed.items()).wait, 60.0)
    assert report.state != "committed"
    await pool.tell(pool.control.wake(["weights"]))
    report = await asyncio.to_thread(pool.source.publish(2, changed.items()).wait, 60.0)
    assert report.state == "committed", report
    await pool.tell(pool.control.wake())
    (result,) = await pool.client.wait(flying, 120)
    assert result.versions == (0, 2), result.segments
    assert (await pool.generate(8)).versions == (2,)
    found = await pool.control.audit()
    assert found.clean, found

    # The trainer's version does not survive without a copy; it comes from the trainer again.
    await pool.tell(pool.control.sleep())
    woken = await pool.tell(pool.control.wake())
    assert woken["intact"] == keeps
    assert (await pool.generate(8)).versions == (2,)
    assert (await pool.control.audit()).clean
    assert pool.worker._keeper.restarts == 0


@pytest.mark.parametrize("memory_saver", ["on", "backup"])
def test_memory_is_given_up_and_taken_again(tmp_path: Path, memory_saver: str) -> None:
    pytest.importorskip("torch_memory_saver")
    model = tmp_path / "model"
    write_tiny_model(model, context=2048)

    async def run() -> None:
        async with running(model, memory_saver=memory_saver, max_total_tokens=KV_TOKENS) as pool:
            await _sleep_and_wake(pool, model, memory_saver == "backup")

    asyncio.run(run())


def test_an_engine_without_a_memory_saver_says_so(tmp_path: Path) -> None:
    model = tmp_path / "model"
    write_tiny_model(model, context=2048)

    async def run() -> None:
        async with running(model) as pool:
            assert "memory_saver='on'" in await pool.why_not(pool.control.sleep())
            assert len((await pool.generate(8)).token_ids) == 8

    asyncio.run(run())
