"""LoRA adapters for tests: tensors that PEFT could have made, a publisher, jobs, and what their tokens must be."""

from __future__ import annotations

import asyncio
from typing import Any

import torch
from support.pools.pool import check_scripted, wait_replies
from support.specimens.messages import job

from rolloutmq import WeightPublisher
from rolloutmq.messages import Broker, RolloutResult, SamplingParams
from rolloutmq.messages.model.jobs import GenerateJob

RANK = 4
CONFIG = {"r": RANK, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "peft_type": "LORA"}
HEAD = "base_model.model.model.layers.0.self_attn"


def tensors(version: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    seeded = torch.Generator().manual_seed(version)
    made = {}
    for module, outputs in (("q_proj", 48), ("v_proj", 16)):
        made[f"{HEAD}.{module}.lora_A.weight"] = torch.randn(RANK, 32, generator=seeded).to(dtype)
        made[f"{HEAD}.{module}.lora_B.weight"] = torch.randn(outputs, RANK, generator=seeded).to(dtype)
    return made


async def publish(source: WeightPublisher, name: str, version: int) -> Any:
    handle = source.publish_adapter(name, version, tensors(version), CONFIG)
    return await asyncio.to_thread(handle.wait, 60.0)


async def publish_weights(source: WeightPublisher, version: int) -> Any:
    handle = source.publish(version, {"w": torch.full((8,), float(version))})
    return await asyncio.to_thread(handle.wait, 60.0)


def lora(**fields: Any) -> GenerateJob:
    count = fields.pop("tokens", 5)
    return job(**({"lora": "math", "sampling": SamplingParams(max_new_tokens=count)} | fields))


def check(one: RolloutResult, prompt_len: int = 3) -> None:
    """Every token is the one that its position, its weights and its adapter's version demand."""
    if one.adapter is not None:
        assert one.adapter_version == one.adapter_segments[-1].version
    check_scripted(one, prompt_len)


async def results(broker: Broker, count: int) -> list[RolloutResult]:
    found = [reply.outcome for reply in await wait_replies(broker, count)]
    assert all(isinstance(one, RolloutResult) for one in found), found
    for one in found:
        check(one)
    return found
