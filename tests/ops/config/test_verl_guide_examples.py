"""Every configuration in VERL's SGLang guide, as it stands there: what it becomes; and its tools, loaded and run."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.pools.pool import worker
from support.specimens.guide_examples import Example, check, written

from rolloutmq import GenerateJob, RolloutClient, RolloutResult, Staleness
from rolloutmq.messages.model import ToolCall
from rolloutmq.ops.config import load_settings
from rolloutmq.producer.data import run_tool_calls
from rolloutmq.worker.scripted.engine import ScriptedEngine

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
            "engine.context_length": 2566,
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
            "engine.context_length": 2566,
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
            "tools.max_parallel_calls": 1,
            "tools.max_response_length": 256,
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


@pytest.mark.parametrize("name", VERL)
def test_an_example_of_verls_guide(name: str, tmp_path: Path) -> None:
    check(VERL[name], tmp_path)


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


ROLLOUT = """
rollout:
  response_length: 4
  n: 1
  over_sample_rate: 0.25
  multi_turn: {enable: true, max_assistant_turns: 2}
"""


class Endless:
    """Always goes on."""

    def reset(self) -> list[int]:
        return [7]

    def step(self, answer: RolloutResult) -> tuple[list[int], float, bool, dict[str, Any]]:
        return [8], 0.0, False, {}

    def close(self) -> None:
        """Nothing is open."""


async def test_a_program_trains_and_plays_by_verls_file(redis_db: str, tmp_path: Path) -> None:
    """Three of four prompts make a batch, and an episode has two turns: as the file says, over a pool."""
    (tmp_path / "verl.yaml").write_text(ROLLOUT)
    settings = load_settings(tmp_path / "verl.yaml", environment={})
    jobs = [GenerateJob.build(token_ids=[7, place], **settings.job()) for place in range(4)]
    slow = jobs[1].sampling.model_copy(update={"max_new_tokens": 400_000})
    jobs[1] = jobs[1].model_copy(update={"sampling": slow})
    engine = ScriptedEngine(tokens_per_s=2_000.0)
    async with worker(redis_db, engine=engine, max_running=8), RolloutClient(redis_db) as client:
        feed = client.feed(Staleness(eta=0, batch_size=4), settings.group_rules())
        (batch,) = [batch async for batch in feed.batches(jobs, timeout=60)]
        assert [group.number for group in batch] == [0, 2, 3]
        feed.train(batch)
        assert feed.report()["dropped"] == {"surplus": 1}
        sampling = settings.job()["sampling"]
        limits = settings.episode_limits()
        played = [it async for it in client.episodes([0], lambda _: Endless(), limits=limits, sampling=sampling)]
    assert [(len(it.turns), it.stop) for it in played] == [(2, "turns")]
