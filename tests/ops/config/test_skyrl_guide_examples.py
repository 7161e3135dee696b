"""Every configuration in SkyRL's SGLang guide, as it stands there: what it becomes, or the one key that is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.specimens.guide_examples import Example, check, written

from rolloutmq.ops.config import explain

PP = "every pipeline stage has each of them again"
SKYRL = {
    "quick start": Example('generator:\n  backend: "sglang"\n'),
    "minimal command": Example("generator.backend=sglang generator.run_engines_locally=true"),
    "backend selection": Example('generator:\n  backend: "sglang"\n  run_engines_locally: true\n'),
    "parallelism": Example(
        """
generator:
  backend: sglang
  num_inference_engines: 2
  inference_engine_tensor_parallel_size: 4
  inference_engine_pipeline_parallel_size: 2
  inference_engine_data_parallel_size: 1
  inference_engine_expert_parallel_size: 4
""",
        {"engine.tp_size": 4, "engine.ep_size": 4},
        {"generator.inference_engine_pipeline_parallel_size": PP},
    ),
    "memory": Example(
        "generator: {gpu_memory_utilization: 0.8, max_num_batched_tokens: 8192, max_num_seqs: 1024}",
        {
            "engine.mem_fraction": 0.8,
            "engine.extra.max_prefill_tokens": 8192,
            "worker.max_running": 1024,
            "engine.max_running": 1024,
        },
    ),
    "sampling": Example(
        r"""
generator:
  sampling_params:
    max_generate_length: 1024
    temperature: 1.0
    top_p: 1.0
    top_k: -1
    min_p: 0.0
    logprobs: 0
    stop: ["</s>", "\n\n"]
""",
        {
            "job.sampling.max_new_tokens": 1024,
            "job.sampling.temperature": 1.0,
            "job.sampling.top_p": 1.0,
            "job.sampling.top_k": -1,
            "job.sampling.min_p": 0.0,
            "job.logprobs.sampled": True,
            "job.sampling.stop": ("</s>", "\n\n"),
        },
    ),
    "adapters": Example(
        """
generator:
  backend: sglang
  enable_lora: true
  engine_init_kwargs:
    max_lora_rank: 64
    max_loras_per_batch: 8
    lora_backend: "csgmv"
""",
        {"engine.max_lora_rank": 64, "engine.max_loras_per_batch": 8, "engine.extra.lora_backend": "csgmv"},
    ),
    "HTTP": Example(
        """
generator:
  backend: sglang
  enable_http_endpoint: true
  http_endpoint_host: "0.0.0.0"
  http_endpoint_port: 8000
  async_engine: true
"""
    ),
    "CUDA IPC": Example(
        'generator: {weight_sync_backend: "nccl"}\ntrainer: {placement: {colocate_all: true}}\n',
        {"engine.memory_saver": "on"},
    ),
    "broadcast": Example(
        'generator: {weight_sync_backend: "broadcast"}\ntrainer: {placement: {colocate_all: false}}\n'
    ),
    "engine arguments": Example(
        """
generator:
  engine_init_kwargs:
    attention_backend: "fa3"
    mm_attention_backend: "fa3"
    max_lora_rank: 64
    max_loras_per_batch: 8
    lora_backend: "csgmv"
    moe_a2a_backend: "deepep"
    moe_runner_backend: "auto"
    enable_eplb: true
""",
        {
            "engine.attention_backend": "fa3",
            "engine.extra.mm_attention_backend": "fa3",
            "engine.max_lora_rank": 64,
            "engine.max_loras_per_batch": 8,
            "engine.extra.lora_backend": "csgmv",
            "engine.extra.moe_a2a_backend": "deepep",
            "engine.extra.moe_runner_backend": "auto",
        },
        beside="generator.backend=sglang",
    ),
    "hybrid engine": Example(
        """
trainer:
  placement:
    colocate_all: true
    policy_num_gpus_per_node: 4
    policy_num_nodes: 2

generator:
  num_inference_engines: 8
  gpu_memory_utilization: 0.8
""",
        {"engine.memory_saver": "on", "engine.mem_fraction": 0.8},
    ),
    "multi-turn": Example("generator: {use_conversation_multi_turn: true}"),
    "prefix caching": Example("generator: {enable_prefix_caching: true}"),
    "attention backend": Example(
        'generator: {engine_init_kwargs: {attention_backend: "fa3"}}',
        {"engine.attention_backend": "fa3"},
        beside="generator.backend=sglang",
    ),
    "large models": Example(
        """
generator:
  backend: sglang
  inference_engine_tensor_parallel_size: 4
  inference_engine_pipeline_parallel_size: 2
""",
        {"engine.tp_size": 4},
        {"generator.inference_engine_pipeline_parallel_size": PP},
    ),
    "full-featured": Example(
        """
generator:
  backend: sglang
  run_engines_locally: true
  num_inference_engines: 8
  inference_engine_tensor_parallel_size: 2
  inference_engine_pipeline_parallel_size: 2
  inference_engine_data_parallel_size: 1
  inference_engine_expert_parallel_size: 1
  gpu_memory_utilization: 0.8
  enable_prefix_caching: true
  weight_sync_backend: nccl
  async_engine: true
  batched: true
  enable_lora: true
  enable_http_endpoint: true
  http_endpoint_port: 8000
  sampling_params:
    max_generate_length: 1024
    temperature: 1.0
    stop: ["</s>"]
  engine_init_kwargs:
    attention_backend: "fa3"
    max_lora_rank: 64
    max_loras_per_batch: 8

trainer:
  strategy: fsdp2
  placement:
    colocate_all: true
""",
        {
            "engine.tp_size": 2,
            "engine.mem_fraction": 0.8,
            "job.sampling.max_new_tokens": 1024,
            "job.sampling.temperature": 1.0,
            "job.sampling.stop": ("</s>",),
            "engine.attention_backend": "fa3",
            "engine.max_lora_rank": 64,
            "engine.max_loras_per_batch": 8,
            "engine.memory_saver": "on",
        },
        {"generator.inference_engine_pipeline_parallel_size": PP},
    ),
    "experts": Example(
        """
generator:
  backend: sglang
  inference_engine_tensor_parallel_size: 4
  inference_engine_expert_parallel_size: 4
  engine_init_kwargs:
    moe_a2a_backend: "deepep"
    moe_runner_backend: "auto"
    enable_eplb: true
""",
        {
            "engine.tp_size": 4,
            "engine.ep_size": 4,
            "engine.extra.moe_a2a_backend": "deepep",
            "engine.extra.moe_runner_backend": "auto",
        },
    ),
    "Megatron": Example("trainer: {strategy: megatron}\ngenerator: {backend: sglang, weight_sync_backend: nccl}\n"),
}


@pytest.mark.parametrize("name", SKYRL)
def test_an_example_of_skyrls_guide(name: str, tmp_path: Path) -> None:
    check(SKYRL[name], tmp_path)


@pytest.mark.parametrize("name", ["HTTP", "full-featured"])
def test_what_is_not_served_here_is_told_at_every_load(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fates = {fate.key: fate for fate in explain(written(tmp_path, SKYRL[name]), {}).fates}
    assert fates["generator.enable_http_endpoint"].verdict == "ignored"
    assert "SkyRLEngine.chat_completion" in fates["generator.enable_http_endpoint"].what
    assert "enable_http_endpoint=true is not served here: nothing of the pool listens on HTTP" in caplog.text
