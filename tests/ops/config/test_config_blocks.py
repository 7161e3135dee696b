"""SkyRL's and VERL's own configuration, loaded as it is."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rolloutmq import GenerateJob, SamplingParams
from rolloutmq.messages.errors import ConfigError, InvalidField
from rolloutmq.messages.model.sampling import LogprobOptions
from rolloutmq.ops.config import explain, load_settings, skyrl, verl
from rolloutmq.worker.sglang import check_parallelism

CONFIGS = Path(__file__).parent / "configs"
ROOT = Path(__file__).parents[3]


def changed(tmp_path: Path, file: str, *changes: tuple[str, Any]) -> Path:
    """A copy of a file with other values at dotted places."""
    document = yaml.safe_load((CONFIGS / file).read_text())
    for place, value in changes:
        *parts, last = place.split(".")
        inside = document
        for part in parts:
            inside = inside[part]
        inside[last] = value
    path = tmp_path / file
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    return path


def test_a_flat_skyrl_configuration_becomes_worker_engine_jobs_and_publisher() -> None:
    loaded = load_settings(CONFIGS / "skyrl_flat.yaml", environment={})
    assert loaded.worker().max_running == 96
    engine = loaded.engine()
    assert (engine.model, engine.dtype, engine.tp_size, engine.max_running) == ("models/arith-1b", "float16", 4, 96)
    assert (engine.mem_fraction, engine.context_length, engine.max_lora_rank) == (0.7, 4096, 16)
    assert (engine.cuda_graph, engine.prefill_cuda_graph, engine.attention_backend) == (False, False, "triton")
    assert engine.extra.pop("ep_size", getattr(engine, "ep_size", None)) == 2
    assert json.loads(engine.extra.pop("json_model_override_args")) == {
        "rope_scaling": {"rope_type": "yarn", "factor": 2.0}
    }
    assert engine.extra == {
        "disable_radix_cache": True,
        "chunked_prefill_size": -1,
        "max_prefill_tokens": 6144,
        "watchdog_timeout": 900,
    }
    job = GenerateJob.build(token_ids=[1], **loaded.job())
    assert (job.n, job.logprobs) == (6, LogprobOptions())
    assert job.sampling == SamplingParams(
        max_new_tokens=640,
        min_new_tokens=4,
        repetition_penalty=1.05,
        temperature=0.9,
        top_p=0.95,
        min_p=0.01,
        stop=("</answer>",),
    )
    judged = GenerateJob.build(token_ids=[1], **loaded.job("eval"))
    assert (judged.n, judged.sampling.temperature, judged.sampling.max_new_tokens) == (2, 0.0, 640)
    assert loaded.publisher() == {
        "redis_url": loaded.worker().redis_url,
        "pool": "default",
        "gpu_direct": False,
        "bucket_bytes": 1 << 28,
    }


def test_a_nested_skyrl_block_becomes_the_same_kinds_of_settings() -> None:
    loaded = load_settings(CONFIGS / "skyrl_nested.yaml", environment={"ROLLOUTMQ_ENGINE_MODEL": "m"})
    engine = loaded.engine()
    assert (engine.dtype, engine.tp_size, engine.max_running, engine.mem_fraction) == ("bfloat16", 2, 320, 0.66)
    assert (engine.cuda_graph, engine.random_seed, engine.context_length) == (True, 5, 12288)
    assert json.loads(engine.extra["json_model_override_args"])["rope_parameters"]["factor"] == 4.0
    assert engine.routed_experts
    assert loaded.job()["routed_experts"] is True
    assert (loaded.job()["n"], loaded.job("eval")["n"]) == (12, 3)
    assert loaded.publisher()["bucket_bytes"] == 1536 << 20


def test_a_verl_configuration_becomes_worker_engine_jobs_and_publisher() -> None:
    loaded = load_settings(CONFIGS / "verl.yaml", environment={})
    assert loaded.worker().max_running == 160
    engine = loaded.engine()
    assert (engine.model, engine.dtype, engine.tp_size, engine.max_running) == ("models/arith-8b", "bfloat16", 2, 160)
    assert (engine.mem_fraction, engine.context_length, engine.load_format) == (0.55, 3072, "dummy")
    assert (engine.random_seed, engine.attention_backend, engine.deterministic) == (77, "flashinfer", True)
    assert engine.extra == {
        "max_prefill_tokens": 12000,
        "limit_mm_data_per_request": {"image": 3},
        "max_queued_requests": 500,
        "trust_remote_code": True,
    }
    job = GenerateJob.build(token_ids=[1], **loaded.job())
    assert (job.n, job.logprobs) == (7, LogprobOptions(kind="scaled"))
    assert job.sampling == SamplingParams(max_new_tokens=1500, temperature=0.8)
    judged = GenerateJob.build(token_ids=[1], **loaded.job("eval"))
    assert (judged.n, judged.sampling.temperature) == (4, 0.0)
    assert loaded.publisher()["bucket_bytes"] == 768 << 20


def test_interpolations_are_followed_through_the_whole_file() -> None:
    fates = {fate.key: fate for fate in explain(CONFIGS / "verl.yaml", {}).fates}
    assert fates["actor_rollout_ref.rollout.response_length"].value == 1500
    assert fates["actor_rollout_ref.rollout.mtp"].value == {"enable": False, "enable_rollout": False}
    assert fates["actor_rollout_ref.rollout.qat"].value == {"enable": False, "mode": "w4a16"}


@pytest.mark.parametrize("file", ["skyrl_flat.yaml", "skyrl_nested.yaml", "skyrl_agent.yaml", "verl.yaml"])
def test_every_key_of_a_block_has_one_fate_and_a_reason(file: str) -> None:
    explained = explain(CONFIGS / file, {})
    assert not explained.refused
    keys = [fate.key for fate in explained.fates]
    assert len(keys) == len(set(keys))
    assert all(fate.what for fate in explained.fates)
    prefix = ".".join(explained.block.path)
    for key in explained.block.values:
        assert any(name == f"{prefix}.{key}" or name.startswith(f"{prefix}.{key}.") for name in keys), key


def test_the_files_here_have_every_key_that_the_tables_know() -> None:
    flat, nested, agent = (
        yaml.safe_load((CONFIGS / f"skyrl_{kind}.yaml").read_text())["generator"]
        for kind in ("flat", "nested", "agent")
    )
    known = skyrl.table(nested)
    assert known.keys() <= flat.keys() | nested.keys() | nested["inference_engine"].keys() | agent.keys()
    inside = known["inference_engine"]
    assert isinstance(inside, dict)
    assert nested["inference_engine"].keys() <= inside.keys()
    rollout = yaml.safe_load((CONFIGS / "verl.yaml").read_text())["actor_rollout_ref"]["rollout"]
    older = {"update_weights_bucket_megabytes", "use_shm"}
    assert verl.table(rollout).keys() - rollout.keys() == older


VERL = "actor_rollout_ref.rollout"


@pytest.mark.parametrize(
    ("file", "place", "value", "says"),
    [
        ("skyrl_flat.yaml", "generator.inference_engine_pipeline_parallel_size", 2, "pipeline stage"),
        ("skyrl_flat.yaml", "generator.inference_engine_data_parallel_size", 2, "start a worker for each replica"),
        ("skyrl_flat.yaml", "generator.inference_engine_expert_parallel_size", 3, "a divisor of tp_size=4"),
        ("skyrl_flat.yaml", "generator.weight_sync_backend", "delta", "nccl, cuda_ipc or gloo"),
        ("skyrl_flat.yaml", "generator.n_sample_per_prompt", 4, "nearest: n_samples_per_prompt"),
        ("skyrl_flat.yaml", "generator.sampling_params.tok_p", 0.5, "nearest: top_p"),
        ("skyrl_flat.yaml", "generator.sampling_params.temperature", -1, "greater than or equal to 0"),
        ("skyrl_flat.yaml", "generator.model_dtype", "int4", "one of auto"),
        ("skyrl_flat.yaml", "generator.max_num_seqs", 0, "greater than or equal to 1"),
        ("skyrl_flat.yaml", "generator.gpu_memory_utilization", "${trainer.memory}", "this file has no trainer.memory"),
        ("skyrl_nested.yaml", "generator.inference_engine.enable_pd", True, "one engine"),
        ("skyrl_nested.yaml", "generator.inference_engine.speculative_config", {"method": "mtp"}, "draft model"),
        ("skyrl_nested.yaml", "generator.inference_engine.engine_init_kwargs.swap_space", 4, "argument of vLLM"),
        (
            "skyrl_nested.yaml",
            "generator.inference_engine.engine_init_kwargs.tensor_parallel_size",
            4,
            "says engine.tp_size=2",
        ),
        ("verl.yaml", f"{VERL}.pipeline_model_parallel_size", 2, "pipeline stage"),
        ("verl.yaml", f"{VERL}.multi_turn.enable", "yes", "true or false"),
        ("verl.yaml", f"{VERL}.prompt_length", 0.5, "a whole number, at least 1"),
        ("verl.yaml", f"{VERL}.limit_images", -1, "a whole number, at least 0"),
        ("skyrl_nested.yaml", "generator.max_input_length", True, "a whole number, at least 1"),
        ("verl.yaml", f"{VERL}.response_length", "???", "somebody has to give"),
        ("verl.yaml", f"{VERL}.disaggregation", {"enabled": True}, "one engine"),
        ("verl.yaml", f"{VERL}.multi_turn.max_assistant_turn", 3, "nearest: max_assistant_turns"),
        ("verl.yaml", f"{VERL}.mtp", {"enable": True, "enable_rollout": True}, "draft model"),
        ("verl.yaml", f"{VERL}.top_p", 0, "greater than 0"),
        ("verl.yaml", f"{VERL}.engine_kwargs.sglang.custom_weight_loader", ["x"], "RolloutMQ sets this argument"),
        ("verl.yaml", f"{VERL}.engine_kwargs.sglang.pp_size", 2, "pipeline stage"),
        ("verl.yaml", f"{VERL}.val_kwargs.best_of", 3, "ask for n"),
        ("verl.yaml", f"{VERL}.checkpoint_engine.update_weights_bucket_megabytes", -1, "megabytes"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_key(
    tmp_path: Path, file: str, place: str, value: Any, says: str
) -> None:
    path = changed(tmp_path, file, (place, value))
    refused = explain(path, {}).refused
    assert says in {fate.key: fate.what for fate in refused}.get(place, refused or "nothing was refused")
    with pytest.raises(ConfigError, match=f"{path.name}.*{place.rpartition('.')[2]}"):
        load_settings(path, environment={})


@pytest.mark.parametrize(
    ("file", "place"),
    [
        ("skyrl_flat.yaml", "trainer.placement.colocate_all"),
        ("skyrl_nested.yaml", "generator.inference_engine.engine_init_kwargs.enable_sleep_mode"),
        ("verl.yaml", f"{VERL}.free_cache_engine"),
    ],
)
def test_a_trainer_that_puts_engines_to_sleep_gets_engines_that_can(tmp_path: Path, file: str, place: str) -> None:
    for wanted, saver in ((True, "on"), (False, "off")):
        path = changed(tmp_path, file, (place, wanted))
        loaded = load_settings(path, environment={"ROLLOUTMQ_ENGINE_MODEL": "m"})
        assert loaded.engine().memory_saver == saver
    path = changed(tmp_path, file, (place, True), ("rolloutmq", {"engine": {"memory_saver": False}}))
    assert load_settings(path, environment={"ROLLOUTMQ_ENGINE_MODEL": "m"}).engine().memory_saver == "off"


def test_what_is_said_of_evaluation_is_shown_as_evaluations(tmp_path: Path) -> None:
    """Also where another key says it already, and where a key beside it is refused."""
    greedy = changed(tmp_path, "verl.yaml", (f"{VERL}.val_kwargs.temperature", 0))
    fates = {fate.key: fate.what for fate in explain(greedy, {}).fates}
    assert fates[f"{VERL}.val_kwargs.temperature"] == "eval.sampling.temperature=0"
    assert fates[f"{VERL}.val_kwargs.do_sample"] == "eval.sampling.temperature=0.0"
    wrong = changed(tmp_path, "verl.yaml", (f"{VERL}.val_kwargs.best_of", 3))
    fates = {fate.key: fate.what for fate in explain(wrong, {}).fates}
    assert fates[f"{VERL}.val_kwargs.top_p"] == "eval.sampling.top_p=1.0"


def test_two_keys_for_one_setting_have_to_agree(tmp_path: Path) -> None:
    path = changed(tmp_path, "skyrl_flat.yaml", ("generator.model_name", "other"))
    (refused,) = explain(path, {}).refused
    assert refused.key == "trainer.policy.model.path"
    assert "generator.model_name says engine.model='other'" in refused.what


def test_a_dummy_start_greedy_rollouts_and_eager_mode(tmp_path: Path) -> None:
    path = changed(
        tmp_path,
        "verl.yaml",
        (f"{VERL}.do_sample", False),
        (f"{VERL}.load_format", "dummy_megatron"),
        (f"{VERL}.enforce_eager", True),
        (f"{VERL}.calculate_log_probs", False),
    )
    loaded = load_settings(path, environment={})
    assert loaded.job()["sampling"].temperature == 0.0
    assert loaded.job()["logprobs"].sampled is False
    assert (loaded.engine().load_format, loaded.engine().cuda_graph) == ("dummy", False)
    assert loaded.worker().first_weights == "newest"  # random weights are not served


def test_a_block_alone_and_its_inside_alone_load_too(tmp_path: Path) -> None:
    rollout = yaml.safe_load((CONFIGS / "verl.yaml").read_text())["actor_rollout_ref"]["rollout"]
    for number, document in enumerate(({"rollout": rollout}, rollout, {"x": {"y": {"rollout": rollout}}})):
        path = tmp_path / f"{number}.yaml"
        path.write_text(yaml.safe_dump(document))
        loaded = load_settings(path, environment={"ROLLOUTMQ_ENGINE_MODEL": "m"})
        assert loaded.engine().tp_size == 2
        assert loaded.job()["sampling"].max_new_tokens == 256  # the default beside the name that leads nowhere


def test_two_blocks_without_a_known_place_are_told_apart_by_nobody(tmp_path: Path) -> None:
    path = tmp_path / "two.yaml"
    path.write_text("a: {rollout: {n: 1}}\nb: {rollout: {n: 2}}\n")
    with pytest.raises(ConfigError, match=r"a\.rollout, b\.rollout"):
        explain(path, {})


def test_our_own_section_in_somebody_elses_file_wins(tmp_path: Path) -> None:
    own = {"engine": {"tp_size": 8}, "worker": {"pool": "math"}, "job": {"temperature": 0.3}}
    path = changed(tmp_path, "skyrl_flat.yaml", ("rolloutmq", own))
    explained = explain(path, {})
    assert not explained.refused
    loaded = explained.settings
    assert (loaded.engine().tp_size, loaded.worker().pool, loaded.job()["sampling"].temperature) == (
        8,
        "math",
        0.3,
    )
    fates = {fate.key: fate.what for fate in explained.fates}
    assert "but rolloutmq.engine.tp_size says" in fates["generator.inference_engine_tensor_parallel_size"]


@pytest.mark.parametrize(
    ("sizes", "field"),
    [({"pp": 2}, "pp_size"), ({"dp": 2}, "dp_size"), ({"tp": 4, "ep": 3}, "ep_size"), ({"tp": 0}, "tp_size")],
)
def test_sizes_that_weight_sync_cannot_follow_are_refused(sizes: dict[str, int], field: str) -> None:
    with pytest.raises(InvalidField) as caught:
        check_parallelism(**sizes)
    assert caught.value.field == field


@pytest.mark.parametrize("sizes", [{}, {"tp": 8}, {"tp": 8, "ep": 8}, {"tp": 8, "ep": 2}])
def test_sizes_that_it_can_follow(sizes: dict[str, int]) -> None:
    check_parallelism(**sizes)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5000) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(min_size=1, max_size=5), inner, max_size=2),
    max_leaves=4,
)
SKYRL_KEYS = sorted(skyrl.table({}))
VERL_KEYS = sorted(verl.table({}))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    st.dictionaries(st.sampled_from(SKYRL_KEYS), VALUES, min_size=1, max_size=5).map(lambda block: {"generator": block})
    | st.dictionaries(st.sampled_from(VERL_KEYS), VALUES, min_size=1, max_size=5).map(lambda block: {"rollout": block})
)
def test_any_values_load_or_are_refused_by_key(tmp_path: Path, document: dict[str, Any]) -> None:
    path = tmp_path / "any.json"
    path.write_text(json.dumps(document))
    explained = explain(path, {})
    ((name, block),) = document.items()
    keys = [fate.key for fate in explained.fates]
    assert all(any(key.startswith(f"{name}.{given}") for key in keys) or block[given] == {} for given in block)
    if explained.refused:
        with pytest.raises(ConfigError, match=re.escape(str(path))):
            load_settings(path, environment={})
    else:
        loaded = load_settings(path, environment={"ROLLOUTMQ_ENGINE_MODEL": "m"})
        loaded.worker()
        loaded.engine()
        GenerateJob.build(token_ids=[1], **loaded.job())
        GenerateJob.build(token_ids=[1], **loaded.job("eval"))
