"""Trainers' files of other shapes: VERL's asynchronous trainers, SkyRL's agents, and files without any settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from rolloutmq.messages.errors import ConfigError, InvalidField
from rolloutmq.ops.config import Explained, explain, load_settings
from rolloutmq.producer.data import ToolLimits

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


def rollout(tmp_path: Path, **keys: Any) -> Explained:
    return explained(tmp_path, yaml.safe_dump({"rollout": keys}))


def said(found: Explained) -> dict[str, Any]:
    assert not found.refused
    return {name: setting.value for name, setting in found.settings.said.items()}


CONVERSATIONS = {
    "enable": True,
    "max_assistant_turns": 5,
    "max_parallel_calls": 3,
    "max_tool_response_length": 300,
    "tool_response_truncate_side": "left",
    "format": "qwen3_coder",
}


def test_verls_turns_and_tools_become_limits_of_episodes_and_of_tools(tmp_path: Path) -> None:
    found = rollout(tmp_path, prompt_length=700, response_length=900, over_sample_rate=0.2, multi_turn=CONVERSATIONS)
    settings = found.settings
    limits = settings.episode_limits(step_s=90.0)
    assert (limits.turns, limits.tokens, limits.step_s) == (5, 1600, 90.0)
    assert settings.group_rules(deliver="samples").over_sample_rate == 0.2
    assert settings.tools().tools == ()
    assert settings.tools().limits == ToolLimits(3, 300, "left")
    assert settings.job()["tool_parser"] == settings.job("eval")["tool_parser"] == "qwen3_coder"


@pytest.mark.parametrize(
    ("answers", "users", "turns", "loser"),
    [
        (5, None, 5, None),
        (None, 3, 4, None),  # the first answer is to the prompt
        (5, 3, 4, "max_assistant_turns"),
        (4, 3, 4, "max_user_turns"),
        (2, 3, 2, "max_user_turns"),
        (0, 3, 4, None),  # 0 is no limit
        (None, None, 900, None),  # each answer has a token at least
    ],
)
def test_the_limit_of_turns_that_comes_first_holds(
    tmp_path: Path, answers: int | None, users: int | None, turns: int, loser: str | None
) -> None:
    both = {"enable": True, "max_assistant_turns": answers, "max_user_turns": users}
    found = rollout(tmp_path, response_length=900, multi_turn=both)
    assert said(found)["episodes.turns"] == turns
    late = [fate.key for fate in found.fates if fate.what == "the other limit of turns comes first"]
    assert late == ([f"rollout.multi_turn.{loser}"] if loser else [])


def test_without_multi_turn_nothing_of_it_counts(tmp_path: Path) -> None:
    for off in ({**CONVERSATIONS, "enable": False}, {"max_assistant_turns": 5}):
        found = rollout(tmp_path, prompt_length=700, response_length=900, multi_turn=off)
        assert said(found).keys() == {"engine.context_length", "job.sampling.max_new_tokens"}
        fates = {fate.key: fate.what for fate in found.fates}
        assert fates["rollout.multi_turn.max_assistant_turns"] == "one turn only: multi_turn.enable is not true"


def test_where_verl_composed_the_file_null_is_the_models_own_context(tmp_path: Path) -> None:
    """verl's servers read it so, and its agent loops send prompts of full length that want full answers."""
    block = {"_target_": "verl.workers.config.RolloutConfig", "prompt_length": 700, "response_length": 900}
    found = rollout(tmp_path, **block, max_model_len=None, multi_turn=CONVERSATIONS)
    assert "engine.context_length" not in said(found)
    assert said(found)["episodes.tokens"] == 1600


@pytest.mark.parametrize(
    ("keys", "context"),
    [
        ({}, 1606),
        ({"max_model_len": None}, 1606),
        ({"max_model_len": 2000}, 2000),
        ({"engine_kwargs": {"sglang": {"context_length": 3000}}}, 3000),
        ({"prompt_length": "${data.longest}"}, 1006),
    ],
)
def test_an_engine_takes_the_longest_prompt_and_answer(tmp_path: Path, keys: dict[str, Any], context: int) -> None:
    block = {"prompt_length": 700, "response_length": 900} | keys
    found = explained(tmp_path, yaml.safe_dump({"rollout": block, "data": {"longest": 100}}))
    assert said(found)["engine.context_length"] == context


@pytest.mark.parametrize(
    ("multi_turn", "key", "says"),
    [
        ({"max_assistant_turns": -1}, "max_assistant_turns", "a whole number, at least 0"),
        ({"max_user_turns": "many"}, "max_user_turns", "a whole number, at least 0"),
        ({"max_parallel_calls": 0}, "max_parallel_calls", "a whole number, at least 1"),
        ({"tool_response_truncate_side": "top"}, "tool_response_truncate_side", "'left', 'middle' or 'right'"),
        ({"tool_config_path": ["a.yaml"]}, "tool_config_path", "valid string"),
        ({"format": 5}, "format", "valid string"),
    ],
)
def test_turns_and_tools_that_cannot_be_are_refused_by_key(
    tmp_path: Path, multi_turn: dict[str, Any], key: str, says: str
) -> None:
    found = rollout(tmp_path, multi_turn={"enable": True, **multi_turn})
    assert [fate.key for fate in found.refused] == [f"rollout.multi_turn.{key}"]
    assert says in found.refused[0].what


@pytest.mark.parametrize("rate", [1, -0.5, True, "0.1"])
def test_a_rate_that_leaves_nothing_is_refused_by_key(tmp_path: Path, rate: Any) -> None:
    found = rollout(tmp_path, over_sample_rate=rate)
    assert [fate.key for fate in found.refused] == ["rollout.over_sample_rate"]


def test_skyrls_turns_and_lengths_become_limits_of_episodes(tmp_path: Path) -> None:
    text = "generator: {max_turns: 4, max_input_length: 800, sampling_params: {max_generate_length: 100}}"
    limits = explained(tmp_path, text).settings.episode_limits()
    assert (limits.turns, limits.tokens) == (4, 900)
    agents = explained(tmp_path, "generator: {infer_backend: sglang, max_iterations: 6}").settings
    assert agents.episode_limits().turns == 6
    open_end = explained(tmp_path, "generator: {max_input_length: 800}").settings
    assert open_end.episode_limits().tokens is None


def test_groups_episodes_and_tools_have_sections_and_variables_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "pool.yaml").write_text(
        "group: {over_sample: 2, deliver: samples}\nepisodes: {turns: 3, on_full: truncate, tokens: 64}\n"
        "tools: {max_parallel_calls: 1}\n"
    )
    settings = load_settings(tmp_path / "pool.yaml", environment={"ROLLOUTMQ_EPISODES_TURNS": "7"})
    rules, limits = settings.group_rules(keep=None), settings.episode_limits()
    assert (rules.over_sample, rules.deliver) == (2, "samples")
    assert (limits.turns, limits.on_full, limits.tokens) == (7, "truncate", 64)
    assert settings.tools().limits.max_parallel_calls == 1
    settings.put("episodes.close_s", -1.0, "me")
    with pytest.raises(InvalidField, match=r"close_s=-1.0: seconds, above 0 \(me\)"):
        settings.episode_limits()


def test_a_file_of_tools_that_is_not_there_is_told_when_the_tools_are_wanted(tmp_path: Path) -> None:
    """Workers read the same file, and have no tools."""
    settings = rollout(tmp_path, multi_turn={"enable": True, "tool_config_path": str(tmp_path / "no.yaml")}).settings
    settings.worker()
    with pytest.raises(ConfigError, match=r"no\.yaml: cannot be read"):
        settings.tools()
