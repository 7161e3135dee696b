"""One file, the environment, flags: which wins, and what is told about it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rolloutmq.messages.errors import ConfigError, InvalidField
from rolloutmq.ops.cli.main import app, load
from rolloutmq.ops.config import load_settings
from rolloutmq.ops.config.settings import MODELS
from rolloutmq.ops.config.sources import WITHOUT_FLAG, from_flags, worker_flags

CONFIGS = Path(__file__).parent / "configs"
POOL = CONFIGS / "pool.toml"


def flags(*arguments: str, environment: dict[str, str] | None = None) -> dict[str, Any]:
    """What `rolloutmq worker` with these arguments says by its flags."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (environment or {}).items():
            patch.setenv(name, value)
        context = load("worker").make_context("worker", ["--model", "m", *arguments])
    return {name: setting.value for name, setting in from_flags(context) if name != "engine.model"}


def run(*arguments: str, environment: dict[str, str] | None = None) -> Any:
    env = {name: None for name in os.environ if name.startswith("ROLLOUTMQ_")} | (environment or {})
    return CliRunner().invoke(app, ["config", *arguments], env=env)


def shown(*arguments: str, environment: dict[str, str] | None = None) -> dict[str, dict[str, Any]]:
    result = run("show", "--json", *arguments, environment=environment)
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


def test_flags_win_over_environment_environment_over_file_and_file_over_defaults() -> None:
    environment = {"ROLLOUTMQ_ENGINE_TP_SIZE": "4", "ROLLOUTMQ_ENGINE_DTYPE": "bfloat16", "ROLLOUTMQ_POOL": "env"}
    found = shown("--config", str(POOL), "--", "--tp", "8", environment=environment)
    assert found["engine.tp_size"] == {"value": 8, "source": "flag --tp"}
    assert found["engine.dtype"] == {"value": "bfloat16", "source": "environment ROLLOUTMQ_ENGINE_DTYPE"}
    assert found["worker.pool"] == {"value": "env", "source": "environment ROLLOUTMQ_POOL"}
    assert found["worker.lease_s"] == {"value": 6.5, "source": f"{POOL}: worker.lease_s"}
    assert found["worker.drain_s"] == {"value": 30.0, "source": "default"}
    assert found["engine.extra.watchdog_timeout"]["value"] == 600


def test_a_flags_default_does_not_win_over_the_file() -> None:
    assert flags() == {}
    assert flags(environment={"ROLLOUTMQ_POOL": "p"}) == {}
    assert flags("--tp", "1", "--pool", "default") == {"engine.tp_size": 1, "worker.pool": "default"}


def test_every_setting_is_a_flag_with_help() -> None:
    options = {option.name: option for option in load("worker").params}
    settings = {name for flag in worker_flags().values() for name in flag.settings}
    fields = {f"{section}.{name}" for section in ("worker", "engine") for name in MODELS[section].model_fields}
    assert settings == fields - {f"engine.{name}" for name in WITHOUT_FLAG}
    for name, one in worker_flags().items():
        assert options[name].help, name
        assert options[name].default == one.flag.default or name in {"redis", "pool"}, name


OLD_FLAGS = """model config redis pool dtype device tp ep max-running prefetch lease checkpoint drain max-lost snapshots
media-host context-length mem-fraction max-total-tokens staging load-format attention-backend sampling-backend
cuda-graph no-cuda-graph prefill-cuda-graph no-prefill-cuda-graph cpu-threads task max-lora-rank tokenizer
hidden-states routed-experts deterministic logit-processor memory-saver sglang log-level"""


def test_flags_keep_their_names() -> None:
    worker_command = load("worker")
    spelled = {name for option in worker_command.params for name in (*option.opts, *option.secondary_opts)}
    assert {f"--{name}" for name in OLD_FLAGS.split()} <= spelled


def test_flags_become_settings() -> None:
    assert flags(
        "--no-cuda-graph", "--max-running", "3", "--snapshots", "x", "--sglang", "a=[1]", "--sglang", "b=c"
    ) == {
        "engine.cuda_graph": False,
        "worker.max_running": 3,
        "engine.max_running": 3,
        "worker.snapshots": "x",
        "engine.extra.a": [1],
        "engine.extra.b": "c",
    }
    assert flags("--media-host", "a", "--media-host", "b", "--logit-processor", "n=m:C") == {
        "worker.media_hosts": ["a", "b"],
        "engine.logit_processors": {"n": "m:C"},
    }
    with pytest.raises(ConfigError, match="NAME=VALUE"):
        flags("--sglang", "a")


def test_a_file_of_ours_becomes_everything_it_says() -> None:
    settings = load_settings(POOL, environment={})
    assert settings.worker().redis_url == "redis://:secret@10.0.0.5:6379/1"
    assert settings.engine().max_running == 48  # as many as the worker claims
    assert settings.engine().extra == {"watchdog_timeout": 600}
    job = settings.job()
    assert (job["n"], job["priority"], job["sampling"].max_new_tokens, job["logprobs"].top) == (4, "high", 200, 3)
    assert settings.job("eval")["sampling"].temperature == 0
    assert settings.publisher() == {
        "redis_url": "redis://:secret@10.0.0.5:6379/1",
        "pool": "sums",
        "mode": "in_place",
        "snapshot_every": 10,
    }


def test_null_in_a_file_of_ours_is_a_value(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("worker: {prefetch: null}\n")
    assert load_settings(file, environment={}).said["worker.prefetch"].value is None
    file.write_text("worker: {prefetch: 3}\n")
    assert load_settings(file, environment={"ROLLOUTMQ_WORKER_PREFETCH": "null"}).worker().prefetch is None
    assert load_settings(file, environment={}).worker().prefetch == 3


def test_on_and_off_are_the_words_although_yaml_takes_them_for_booleans(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("engine: {model: m, staging: on, memory_saver: off, tokenizer: off, cuda_graph: off}\n")
    engine = load_settings(file, environment={}).engine()
    assert (engine.staging, engine.memory_saver, engine.tokenizer, engine.cuda_graph) == ("on", "off", "off", False)


def test_values_of_the_environment_are_json_or_text() -> None:
    settings = load_settings(
        environment={
            "ROLLOUTMQ_REDIS": "redis://10.0.0.1:6379/2",
            "ROLLOUTMQ_WORKER_POOL": "7",
            "ROLLOUTMQ_ENGINE_MODEL": "m",
            "ROLLOUTMQ_ENGINE_CUDA_GRAPH": "false",
            "ROLLOUTMQ_ENGINE_STAGING": "off",
            "ROLLOUTMQ_ENGINE_EXTRA": '{"watchdog_timeout": 5}',
            "ROLLOUTMQ_ENGINE_LORA_TARGET_MODULES": '["q_proj"]',
            "ROLLOUTMQ_JOB_MAX_TOKENS": "9",
            "ROLLOUTMQ_JOB_STOP": "END",
            "ROLLOUTMQ_PUBLISHER_BUCKET_BYTES": "1024",
            "ROLLOUTMQ_OPS_REDIS": "not ours",
            "ROLLOUTMQ_SETUP": "not ours",
        }
    )
    worker_config, engine, job = settings.worker(), settings.engine(), settings.job()
    assert (worker_config.redis_url, worker_config.pool) == ("redis://10.0.0.1:6379/2", "7")
    assert (engine.cuda_graph, engine.staging, engine.lora_target_modules) == (False, "off", ("q_proj",))
    assert engine.extra == {"watchdog_timeout": 5}
    assert (job["sampling"].max_new_tokens, job["sampling"].stop) == (9, ("END",))
    assert settings.publisher()["bucket_bytes"] == 1024


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("worker: {lese_s: 3}", "'worker.lese_s': no such setting; nearest: worker.lease_s"),
        ("wroker: {}", "'wroker': no such key; nearest: worker"),
        ("rolloutmq: {wroker: {}}", "no such section; nearest: worker"),
        ("engine: 3", "engine=3: a mapping is needed"),
        ("engine: {model: m, tp_size: 0}", "engine.tp_size=0: "),
        ("engine: {model: m, extra: {model_path: x}}", "RolloutMQ sets this argument"),
        ("engine: {model: m, extra: {dp_size: 2}}", "engine.extra.dp_size=2: "),
        (
            "engine: {mem_fraction: 0.5, extra: {mem_fraction_static: 0.8}}",
            "engine.extra.mem_fraction_static=0.8: one of",
        ),
        ("engine: {dtype: float16, extra: {dtype: bfloat16}}", "engine.dtype='float16'"),
        ("job: {max_tokns: 3}", "nearest: max_tokens"),
        ("job: {n: 0}", "job.n=0: "),
        ("job: {min_tokens: 5, max_tokens: 4}", "at most max_new_tokens=4"),
        ("job: {priority: urgent}", "job.priority='urgent'"),
        ("publisher: {mode: fast}", "publisher.mode='fast': Input should be 'resume', 'in_place', 'drain' or 'auto'"),
        ("publisher: {port: any}", "publisher.port='any': Input should be a valid integer"),
        ("publisher: {transfer_timeout_s: -1}", "publisher.transfer_timeout_s=-1: Input should be greater than 0"),
        ("publisher: {verify: 2}", "publisher.verify=2: Input should be a valid boolean"),
        ("publisher: {snapshots: 2}", "publisher.snapshots=2: Input should be a valid string"),
        ("worker: {redis_url: 'http://u:secret@h'}", "redis_url"),
        ("generator: {backend: vllm, rope_scaling: {a: 2024-01-01}}", "are JSON"),
        ("generator: {weight_transfer_threshold_cuda_ipc_GB: .inf}", "gigabytes"),
    ],
)
def test_what_a_file_of_ours_cannot_say_is_told_with_file_key_and_what_is_allowed(
    tmp_path: Path, text: str, says: str
) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_settings(file, environment={})
    assert str(file) in str(caught.value)
    assert says in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"ROLLOUTMQ_WORKER_LEASE": "3"}, "ROLLOUTMQ_WORKER_LEASE: no such setting; nearest: ROLLOUTMQ_WORKER_LEASE_S"),
        ({"ROLLOUTMQ_JOB_TEMPRATURE": "1"}, "ROLLOUTMQ_JOB_TEMPRATURE: temprature=1: "),
        ({"ROLLOUTMQ_ENGINE_EXTRA": "3"}, "a JSON object"),
    ],
)
def test_a_variable_that_means_nothing_is_named(environment: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(environment=environment)
    assert says in str(caught.value)


def test_a_value_out_of_range_says_where_it_came_from() -> None:
    settings = load_settings(environment={"ROLLOUTMQ_WORKER_LEASE_S": "0"})
    with pytest.raises(InvalidField, match=r"lease_s=0: .*\(environment ROLLOUTMQ_WORKER_LEASE_S\)"):
        settings.worker()
    with pytest.raises(ConfigError, match=r"engine\.model.*--model"):
        load_settings(environment={}).engine()


def test_explain_prints_every_key_and_exits_1_if_one_is_refused(tmp_path: Path) -> None:
    result = run("explain", str(CONFIGS / "verl.yaml"))
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert "VERL's rollout block, actor_rollout_ref.rollout" in lines[0]
    (line,) = (line for line in lines if line.startswith("actor_rollout_ref.rollout.tensor_model_parallel_size"))
    assert line.split() == ["actor_rollout_ref.rollout.tensor_model_parallel_size", "2", "became", "engine.tp_size=2"]
    file = tmp_path / "bad.yaml"
    file.write_text("rollout: {n: 2, pipeline_model_parallel_size: 2, tok_k: 3}\n")
    result = run("explain", str(file))
    assert result.exit_code == 1
    assert "2 refused" in result.output
    assert run("explain", str(tmp_path / "none.yaml")).exit_code == 2


def test_explain_as_json_has_keys_and_settings() -> None:
    result = run("explain", "--json", str(CONFIGS / "skyrl_flat.yaml"))
    told = json.loads(result.output)
    assert (told["kind"], told["block"], told["refused"]) == ("skyrl", "generator", 0)
    keys = {each["key"]: each for each in told["keys"]}
    assert keys["generator.num_inference_engines"]["verdict"] == "ignored"
    assert keys["generator.max_num_seqs"]["what"] == "worker.max_running=96, engine.max_running=96"
    assert told["settings"]["job.n"] == 6


def test_passwords_are_not_shown() -> None:
    for arguments in (("explain", str(POOL)), ("explain", "--json", str(POOL)), ("show", "--config", str(POOL))):
        output = run(*arguments).output
        assert "10.0.0.5" in output
        assert "secret" not in output


def test_show_tells_a_flag_that_there_is_not_and_a_value_that_cannot_be() -> None:
    assert run("show", "--", "--tpp", "3").exit_code == 2
    result = run("show", "--", "--max-running", "0")
    assert result.exit_code == 2
    assert "InvalidField: max_running=0" in result.output


def test_reading_a_configuration_loads_neither_torch_nor_sglang() -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom rolloutmq.ops.config import explain, load_settings\n"
        "explain(Path(sys.argv[1])); load_settings(Path(sys.argv[1])).engine()\n"
        "assert not {'torch', 'sglang', 'transformers'} & sys.modules.keys()"
    )
    command = [sys.executable, "-c", code, str(CONFIGS / "verl.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
