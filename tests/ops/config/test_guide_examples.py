"""Every configuration in the SGLang guides of SkyRL and VERL, as it stands there: what it becomes, or why it cannot."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple

import pytest
import yaml

from rolloutmq import GenerateJob
from rolloutmq.messages.errors import ConfigError
from rolloutmq.messages.model import ToolCall
from rolloutmq.ops.config import Settings, explain, load_settings
from rolloutmq.producer.data import run_tool_calls

NOTHING: Mapping[str, Any] = MappingProxyType({})


class Example(NamedTuple):
    """text: YAML, or overrides as a command line has them. gives: every setting that it becomes. refused: its keys that
    cannot be honoured, with a part of the reason. beside: what the guide's reader has around the example."""

    text: str
    gives: Mapping[str, Any] = NOTHING
    refused: Mapping[str, str] = NOTHING
    beside: str = ""


PP = "every pipeline stage has each of them again"
EPLB = "experts that move while the engine serves"
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
            "engine.extra.enable_eplb": True,
        },
        {"generator.engine_init_kwargs.enable_eplb": EPLB},
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
            "engine.extra.enable_eplb": True,
        },
        {"generator.engine_init_kwargs.enable_eplb": EPLB},
    ),
    "Megatron": Example("trainer: {strategy: megatron}\ngenerator: {backend: sglang, weight_sync_backend: nccl}\n"),
}
VERL = {
    "minimal": Example(
        """
model_path: "Qwen/Qwen3-0.6B"

rollout:
  name: sglang
  mode: async
  skip_tokenizer_init: true
  prompt_length: 2048
  response_length: 512
  tensor_model_parallel_size: 1
  gpu_memory_utilization: 0.5
  dtype: auto
  enforce_eager: false
""",
        {
            "engine.model": "Qwen/Qwen3-0.6B",
            "engine.context_length": 2560,
            "job.sampling.max_new_tokens": 512,
            "engine.tp_size": 1,
            "engine.mem_fraction": 0.5,
            "engine.dtype": "auto",
            "engine.cuda_graph": True,
        },
    ),
    "full": Example(
        """
rollout:
  name: sglang
  mode: async
  skip_tokenizer_init: true
  prompt_length: 2048
  response_length: 512
  max_model_len: null
  max_num_seqs: 1024
  max_num_batched_tokens: 8192
  temperature: 1.0
  top_k: -1
  top_p: 1.0
  do_sample: true
  n: 1
  ignore_eos: false
  val_kwargs:
    temperature: 0
    do_sample: false
  tensor_model_parallel_size: 1
  data_parallel_size: 1
  expert_parallel_size: 1
  pipeline_model_parallel_size: 1
  gpu_memory_utilization: 0.5
  dtype: auto
  free_cache_engine: true
  enforce_eager: false
  enable_chunked_prefill: true
  enable_prefix_caching: true
  load_format: dummy
  engine_kwargs:
    sglang:
      attention_backend: fa3
  multi_turn:
    enable: false
    tool_config_path: null
    format: hermes
    max_assistant_turns: null
  over_sample_rate: 0.0
  calculate_log_probs: false
  disable_log_stats: true
""",
        {
            "engine.context_length": 2560,
            "job.sampling.max_new_tokens": 512,
            "worker.max_running": 1024,
            "engine.max_running": 1024,
            "engine.extra.max_prefill_tokens": 8192,
            "job.sampling.temperature": 1.0,
            "job.sampling.top_k": -1,
            "job.sampling.top_p": 1.0,
            "job.n": 1,
            "job.sampling.ignore_eos": False,
            "eval.sampling.temperature": 0,
            "engine.tp_size": 1,
            "engine.mem_fraction": 0.5,
            "engine.dtype": "auto",
            "engine.memory_saver": "on",
            "engine.cuda_graph": True,
            "engine.load_format": "dummy",
            "worker.first_weights": "newest",
            "engine.attention_backend": "fa3",
            "group.over_sample_rate": 0.0,
            "job.logprobs.sampled": False,
        },
    ),
    "tools": Example(
        """
rollout:
  multi_turn:
    enable: true
    tool_config_path: tools.yaml
    format: hermes
    max_assistant_turns: 5
""",
        {
            "tools.path": "tools.yaml",
            "job.tool_parser": "hermes",
            "eval.tool_parser": "hermes",
            "episodes.turns": 5,
        },
    ),
    "async needs ids": Example("rollout: {mode: async, skip_tokenizer_init: true}"),
    "out of memory": Example(
        "rollout: {gpu_memory_utilization: 0.3, enforce_eager: true, max_num_seqs: 256}",
        {
            "engine.mem_fraction": 0.3,
            "engine.cuda_graph": False,
            "engine.prefill_cuda_graph": False,
            "worker.max_running": 256,
            "engine.max_running": 256,
        },
    ),
    "no sync mode": Example("rollout: {mode: async}"),
}
EXAMPLES = {f"SkyRL {name}": it for name, it in SKYRL.items()} | {f"VERL {name}": it for name, it in VERL.items()}


def written(tmp_path: Path, example: Example) -> Path:
    """The example as a file; overrides are merged as Hydra merges them."""
    document: dict[str, Any] = {} if "=" in example.text else yaml.safe_load(example.text)
    overrides = example.text.split() if "=" in example.text else []
    for override in (*overrides, *example.beside.split()):
        name, _, value = override.partition("=")
        *parts, last = name.split(".")
        inside = document
        for part in parts:
            inside = inside.setdefault(part, {})
        inside[last] = yaml.safe_load(value)
    path = tmp_path / "example.yaml"
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    return path


def built(settings: Settings) -> None:
    """Everything can be made of it."""
    settings.worker()
    settings.engine()
    for section in ("job", "eval"):
        GenerateJob.build(token_ids=[1], **settings.job(section))
    settings.publisher()
    settings.group_rules()
    settings.episode_limits()


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_of_the_guides(name: str, tmp_path: Path) -> None:
    example = EXAMPLES[name]
    path = written(tmp_path, example)
    found = explain(path, {})
    refused = {fate.key: fate.what for fate in found.refused}
    assert refused.keys() == example.refused.keys()
    assert all(reason in refused[key] for key, reason in example.refused.items())
    assert {name: it.value for name, it in found.settings.said.items()} == example.gives
    assert all(fate.what for fate in found.fates)
    if example.refused:
        with pytest.raises(ConfigError, match=next(iter(example.refused)).rpartition(".")[2]):
            load_settings(path, environment={})
    else:
        built(load_settings(path, environment={"ROLLOUTMQ_ENGINE_MODEL": "m"}))


@pytest.mark.parametrize("name", [name for name, it in EXAMPLES.items() if it.refused])
def test_nothing_but_the_refused_key_keeps_an_example_from_loading(name: str, tmp_path: Path) -> None:
    path = written(tmp_path, EXAMPLES[name])
    document = yaml.safe_load(path.read_text())
    for key in EXAMPLES[name].refused:
        *parts, last = key.split(".")
        inside = document
        for part in parts:
            inside = inside[part]
        del inside[last]
    path.write_text(yaml.safe_dump(document))
    built(load_settings(path, environment={"ROLLOUTMQ_ENGINE_MODEL": "m"}))


@pytest.mark.parametrize("name", ["SkyRL HTTP", "SkyRL full-featured"])
def test_what_is_not_served_here_is_told_at_every_load(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fates = {fate.key: fate for fate in explain(written(tmp_path, EXAMPLES[name]), {}).fates}
    assert fates["generator.enable_http_endpoint"].verdict == "ignored"
    assert "SkyRLEngine.chat_completion" in fates["generator.enable_http_endpoint"].what
    assert "enable_http_endpoint=true is not served here: nothing of the pool listens on HTTP" in caplog.text


TOOLS = """
- class_path: verl.tools.gsm8k_tool.Gsm8kTool
  class_name: Gsm8kTool
  tool_schema:
    type: function
    function:
      name: calculate_answer
      description: "Submit your final numerical answer"
      parameters:
        type: object
        properties:
          answer:
            type: string
            description: "The numerical answer"
        required:
          - answer
"""


class Gsm8kTool:
    """The life of a tool in VERL, in the place of VERL's own class of this name."""

    def __init__(self, config: dict[str, Any], tool_schema: Any) -> None:
        self.tool_schema = tool_schema

    async def create(self, instance_id: str, **_: Any) -> tuple[str, Any]:
        return instance_id, None

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **_: Any
    ) -> tuple[str, float, dict[str, Any]]:
        return f"Current parsed answer: {parameters['answer']}", 0.0, {}

    async def calc_reward(self, instance_id: str, **_: Any) -> float:
        return 1.0

    async def release(self, instance_id: str, **_: Any) -> None:
        return None


async def test_the_guides_tools_are_loaded_and_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("verl", "verl.tools", "verl.tools.gsm8k_tool"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules["verl.tools.gsm8k_tool"], "Gsm8kTool", Gsm8kTool, raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tools.yaml").write_text(TOOLS)
    settings = load_settings(written(tmp_path, VERL["tools"]), environment={})
    registry = settings.tools()
    (tool,) = registry.tools
    assert tool.function.name == "calculate_answer"
    job = GenerateJob.build(token_ids=[1], tools=registry.tools, **settings.job())
    assert job.tool_parser == "hermes"
    assert settings.episode_limits().turns == 5
    call = ToolCall(id="1", name="calculate_answer", arguments={"answer": "4"})
    (outcome,) = await run_tool_calls([call], registry)
    assert (outcome.content, outcome.state_reward) == ("Current parsed answer: 4", 1.0)
