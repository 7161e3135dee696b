"""What a pool says of itself when a trainer takes it for one server: in SGLang's words, and in vLLM's."""

from __future__ import annotations

import time
from typing import Any

from .control import Control, Load
from .tenants import Tenant


async def server_info(control: Control, tenant: Tenant) -> dict[str, Any]:
    """The answer of /server_info: SGLang's arguments of the pool's workers, and `vllm_config`."""
    pool = await control.pool(tenant)
    model = await pool.facts.model()
    version = str((await pool.facts.read(0.0)).committed)
    # One rank takes part in a trainer's broadcasts, however many GPUs there are: see `world_size`.
    parallel = {"data_parallel_size": 1, "tensor_parallel_size": 1, "pipeline_parallel_size": 1, "world_size": 1}
    sglang: dict[str, Any] = {"model_path": model.path, "served_model_name": model.name, "tokenizer_path": model.path}
    sglang |= {"tp_size": 1, "pp_size": 1, "ep_size": 1, "dp_size": 1, "disaggregation_mode": "null"}
    sglang |= {"enable_memory_saver": False, "enable_lora": True, "context_length": model.context, "version": "0.5.23"}
    lora = {"max_lora_rank": 64, "max_loras": 64}
    about = {"model": model.path, "dtype": "torch.bfloat16", "max_model_len": model.context}
    vllm = {"model_config": about, "parallel_config": parallel, "lora_config": lora}
    vllm |= {"weight_transfer_config": {"backend": "nccl"}}
    return sglang | {"internal_states": [{"weight_version": version}], "vllm_config": vllm}


async def model_info(control: Control, tenant: Tenant) -> dict[str, Any]:
    """The answer of SGLang's /model_info."""
    pool = await control.pool(tenant)
    committed, model = (await pool.facts.read(0.0)).committed, await pool.facts.model()
    about = {"model_path": model.path, "tokenizer_path": model.path, "is_generation": True}
    return about | {"weight_version": str(committed), "served_model_name": model.name}


def loads(load: Load) -> dict[str, Any]:
    """The answer of SGLang's /v1/loads: the pool as one engine."""
    at, total = time.time(), load.running + load.waiting
    one = {"timestamp": at, "dp_rank": 0, "num_running_reqs": load.running, "num_waiting_reqs": load.waiting}
    one |= {"num_total_reqs": total, "num_used_tokens": load.used, "max_total_num_tokens": load.capacity}
    one |= {"max_running_requests": load.slots, "token_usage": usage(load), "gen_throughput": load.rate}
    return {"timestamp": at, "version": "0.5.23", "accelerator": "pool", "num_accelerators": 1, "loads": [one]}


def usage(load: Load) -> float:
    """The share of all KV caches that is in use, as far as workers say: 0 to 1."""
    return min(1.0, load.used / load.capacity) if load.capacity else 0.0


def metrics(load: Load, name: str) -> str:
    """Prometheus' text with vLLM's families: the pool as one engine, whose queue is the tenant's own."""
    labels = f'engine="0",model_name="{_escaped(name)}"'
    config = f'cache_dtype="auto",engine="0",block_size="1",num_gpu_blocks="{load.capacity}"'
    config += f',kv_cache_size_tokens="{load.capacity}"'
    rows = [
        ("cache_config_info", "gauge", config, 1),
        ("num_requests_running", "gauge", labels, load.running),
        ("num_requests_waiting", "gauge", labels, load.waiting),
        ("num_requests_waiting_by_reason", "gauge", f'{labels},reason="capacity"', load.waiting),
        ("kv_cache_usage_perc", "gauge", labels, usage(load)),
        ("num_preemptions", "counter", labels, 0),
    ]
    lines = []
    for family, kind, its, value in rows:
        suffix = "_total" if kind == "counter" else ""
        lines += [f"# HELP vllm:{family} Of the pool.", f"# TYPE vllm:{family} {kind}"]
        lines.append(f"vllm:{family}{suffix}{{{its}}} {value}")
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
