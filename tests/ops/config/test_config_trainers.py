"""Trainers' files of other shapes: VERL's asynchronous trainers, SkyRL's agents, and files without any settings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rolloutmq.messages.errors import ConfigError
from rolloutmq.ops.config import Explained, explain, load_settings

ASYNCHRONOUS = """
defaults: [ppo_trainer, _self_]
async_training: {staleness_threshold: 0.2, partial_rollout: true}
rollout: {nnodes: 2, n_gpus_per_node: 4, n: 9, total_rollout_steps: 30}
actor_rollout_ref:
  model: {path: models/small}
  rollout:
    n: 5
    response_length: 300
    gpu_memory_utilization: 0.3
    standalone_gpu_memory_utilization: 0.7
    sglang_rollout_mode: server
    checkpoint_engine: {backend: nccl}
"""
ENGINE = """
generator:
  inference_engine:
    enable_lora: true
    rope_parameters: {rope_type: yarn, factor: 2.0}
    engine_init_kwargs:
      {disable_custom_all_reduce: true, enable_log_requests: false, compilation_config: {cudagraph_mode: FULL}}
"""


def explained(tmp_path: Path, text: str, name: str = "a.yaml") -> Explained:
    path = tmp_path / name
    path.write_text(text)
    return explain(path, {})


def test_a_rollout_at_the_top_says_how_many_nodes_verl_starts_and_nothing_about_engines(tmp_path: Path) -> None:
    found = explained(tmp_path, ASYNCHRONOUS)
    assert not found.refused
    assert found.block.path == ("actor_rollout_ref", "rollout")
    job, engine = found.settings.job(), found.settings.engine()
    assert (job["n"], job["sampling"].max_new_tokens, engine.model) == (5, 300, "models/small")
    fates = {fate.key: fate for fate in found.fates}
    assert fates["rollout"].verdict == fates["actor_rollout_ref.rollout.sglang_rollout_mode"].verdict == "ignored"


def test_the_share_of_memory_is_that_of_standalone_engines_where_there_is_one(tmp_path: Path) -> None:
    assert explained(tmp_path, ASYNCHRONOUS).settings.engine().mem_fraction == 0.7
    unset = ASYNCHRONOUS.replace("utilization: 0.7", "utilization: null")
    assert explained(tmp_path, unset).settings.engine().mem_fraction == 0.3


def test_a_generator_of_skyrls_agents_becomes_engine_and_jobs() -> None:
    found = load_settings(Path(__file__).parent / "configs" / "skyrl_agent.yaml", environment={})
    engine, job, judged = found.engine(), found.job(), found.job("eval")
    assert (engine.model, engine.context_length) == ("models/small", 4000)
    assert (job["n"], job["sampling"].max_new_tokens, job["sampling"].top_p) == (6, 700, 0.9)
    assert (judged["n"], judged["sampling"].max_new_tokens, judged["sampling"].temperature) == (2, 800, 0.0)


def test_lora_rope_and_vllms_own_switches_in_an_engine_of_skyrl(tmp_path: Path) -> None:
    found = explained(tmp_path, ENGINE)
    assert not found.refused
    extra = load_settings(tmp_path / "a.yaml", environment={"ROLLOUTMQ_ENGINE_MODEL": "m"}).engine().extra
    assert json.loads(extra["json_model_override_args"]) == {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}
    assert extra["disable_custom_all_reduce"] is True


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("defaults: [base, _self_]\nactor_rollout_ref: {model: {path: m}}\n", "Hydra composes this file"),
        ("repos: [{repo: x, rev: y}]\n", "no settings of workers, engines or jobs are here: it begins with 'repos'"),
        ("wroker: {pool: p}\n", "'wroker': no such key; nearest: worker"),
        (  # a reference model's file has keys of VERL's rollout, but none that an engine depends on
            "rollout_n: 4\nlog_prob_use_dynamic_bsz: true\nlog_prob_micro_batch_size: 2\nprofiler: {}\n",
            "'rollout_n': no such key",
        ),
    ],
)
def test_a_file_without_settings_says_so(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=r"a\.yaml: ") as caught:
        explained(tmp_path, text)
    assert says in str(caught.value)
