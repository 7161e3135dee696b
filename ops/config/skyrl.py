"""SkyRL's `generator:` block: the present one (engine settings in `inference_engine`), the older flat one, and agents'.

Keys are those of GeneratorConfig, InferenceEngineConfig and SamplingParams in skyrl/train/config/config.py, of
ppo_base_config.yaml and the inference_engine fields that were directly under `generator` before, and of the
`generator:` block that SkyRL's agents read (skyrl-agent).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...messages.dialects import Rule
from . import engine_arguments as engine
from .engine_arguments import SGLANG, VLLM, VLLM_OTHER, Told, positive, switch
from .translate import Arguments, Sampling, Table

log = logging.getLogger(__name__)
_HTTP = Rule(why="for HTTP, where no worker listens")
_NO_HTTP = "nothing of the pool listens on HTTP: SkyRLEngine.chat_completion and .completion take such bodies"
_VLLM = Rule(why="about vLLM's processes")
_RENDERED = Rule(why="SkyRL's generator renders conversations itself, and sends ids")
_TRAINED_ON = Rule(why="what is trained on is the trainer's; a result's finish_reason says how it ended")


def _endpoint(value: Any) -> Told:
    """Nothing is set. A whole file is not refused for what its jobs do without, but it is told at every load."""
    if switch(value):
        log.warning("enable_http_endpoint=true is not served here: %s", _NO_HTTP)
    return {}


def _input_length(block: Mapping[str, Any]) -> Rule:
    """SkyRL ends a conversation when its input is longer, so the last answer comes on top."""
    longest, sampling = positive(block, "max_input_length"), block.get("sampling_params")
    answer = positive(sampling, "max_generate_length") if isinstance(sampling, Mapping) else None
    if longest is None or answer is None:
        return engine.PROMPTS
    return Rule(lambda _: {"episodes.tokens": longest + answer}, "with sampling_params.max_generate_length on top")


def _backend(value: Any) -> Told:
    """The setting for the way that weights are sent."""
    if value == "gloo":
        return {"publisher.gpu_direct": False}
    if value in {"nccl", "cuda_ipc", "broadcast"}:
        return {}
    raise ValueError("nccl, cuda_ipc or gloo; whole versions are sent (publisher.snapshots saves them on disk, too)")


def _gigabytes(value: Any) -> Told:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ValueError("gigabytes, more than 0")
    return {"publisher.bucket_bytes": int(value * (1 << 30))}


_POOL = ("run_engines_locally", "external_proxy_url", "external_server_urls", "remote_urls")
_PLAYED = (
    *("step_wise_trajectories", "merge_stepwise_output", "vision_language_generator", "rate_limit", "task"),
    *("miniswe_config_path", "enable_child_agents", "train_child_trajectories"),
)


def _engine(*, vllm: bool) -> dict[str, Any]:
    return {
        **engine.TRAINERS,
        **dict.fromkeys(_POOL, engine.CLUSTER),
        **dict.fromkeys(("http_endpoint_host", "http_endpoint_port"), _HTTP),
        "enable_http_endpoint": Rule(_endpoint, _NO_HTTP),
        "model_dtype": engine.DTYPE,
        "serialized_weight_sync_mode": Rule(refuse="weights travel in the dtype that the trainer gives them"),
        "num_engines": Rule(why="as many workers as you start, whatever the trainer's GPUs; they may come and go"),
        "backend": engine.ENGINES,
        "weight_sync_backend": Rule(_backend, "NCCL, CUDA IPC or TCP, as the hosts have it"),
        "weight_transfer_threshold_cuda_ipc_GB": Rule(_gigabytes),
        "delta_weight_sync": Rule(refuse="whole versions are sent, not differences"),
        "tensor_parallel_size": engine.TP,
        "pipeline_parallel_size": engine.PP,
        "vllm_v1_disable_multiproc": _VLLM,
        "enable_return_routed_experts": engine.ROUTED_EXPERTS,
        "enable_lora": engine.LORA_SWITCH,
        **engine.ROPE,
        "fully_sharded_loras": Rule(why="how vLLM lays adapters out"),
        "enable_ray_prometheus_stats": engine.COUNTS,
        "offload_kv_for_weight_sync": Rule(why="what becomes of the KV cache at an update is publisher.mode"),
        "use_expandable_segments": Rule(why="set PYTORCH_CUDA_ALLOC_CONF where the worker starts"),
        "served_model_name": _HTTP,
        "distributed_executor_backend": _VLLM,
        "language_model_only": engine.PARTS,
        "engine_init_kwargs": Arguments(VLLM, VLLM_OTHER) if vllm else Arguments(SGLANG),
        "speculative_config": Rule(refuse="the weights of a draft model would not be updated"),
        "enable_pd": Rule(refuse="prefill and decoding run in one engine here", unless=(False,)),
        "num_prefill": Rule(refuse="prefill and decoding run in one engine here", unless=(0,)),
        "router_init_kwargs": engine.CLUSTER,
        "async_engine": engine.CLIENTS,
        "override_existing_update_group": Rule(why="groups are kept or made anew as the roster needs it"),
    }


_PARALLEL = ("tensor", "pipeline", "expert", "data")
_RENAMED = {
    **{f"inference_engine_{kind}_parallel_size": f"{kind}_parallel_size" for kind in _PARALLEL},
    "num_inference_engines": "num_engines",
    "remote_inference_engine_urls": "remote_urls",
}


def table(block: Mapping[str, Any]) -> Table:
    """The rules for a `generator:` block. engine_init_kwargs belong to the backend that it names, by default vLLM."""
    inside = block.get("inference_engine")
    backend = block.get("backend") or (inside.get("backend") if isinstance(inside, Mapping) else None) or "vllm"
    now = _engine(vllm=backend != "sglang")
    before = {old: now[new] for old, new in _RENAMED.items()}
    before |= {name: rule for name, rule in now.items() if name not in _RENAMED.values()}
    return {
        **before,
        **_AGENT,
        **dict.fromkeys(_PLAYED, engine.EPISODES),
        "max_turns": _TURNS,
        **dict.fromkeys(("zero_reward_on_non_stop", "apply_overlong_filtering"), _TRAINED_ON),
        "use_conversation_multi_turn": _RENDERED,
        "append_eos_token_after_stop_str_in_multi_turn": _RENDERED,
        "inference_engine": now,
        "model_name": engine.MODEL,
        "n_samples_per_prompt": Rule(lambda value: {"job.n": value}),
        "eval_n_samples_per_prompt": Rule(lambda value: {"eval.n": value}),
        "sampling_params": Sampling("job", "skyrl"),
        "eval_sampling_params": Sampling("eval", "skyrl"),
        "batched": Rule(why="requests are batched by the engine, as they come"),
        "max_input_length": _input_length(block),
        **dict.fromkeys(("chat_template", "chat_template_kwargs"), _RENDERED),
        "use_cache_salt": Rule(why="prefixes are never shared across weights versions"),
    }


_TURNS = engine.count("episodes.turns", "answers of the model in an episode")
_AGENT: Table = {
    "infer_backend": engine.ENGINES,
    "backend_config": {
        "model_name": engine.MODEL,
        "api_url": engine.CLUSTER,
        "model_max_len": engine.engine("context_length"),
    },
    "num_trajectories": Rule(lambda value: {"job.n": value}),
    "val_config": {
        "num_trajectories": Rule(lambda value: {"eval.n": value}),
        "sampling_params": Sampling("eval", "skyrl"),
    },
    "max_prompt_length": engine.PROMPTS,
    "max_iterations": _TURNS,
    **dict.fromkeys(
        (
            *("early_step_threshold", "enable_turn_reminder", "vision_is_active", "profile_tools"),
            *("remove_think_tokens", "qwen3_enable_thinking", "qwen3_acc_thinking", "debug_log"),
        ),
        engine.EPISODES,
    ),
}
"""What SkyRL's agents have in their `generator:` block instead."""
BESIDE: Mapping[tuple[str, ...], Rule] = {
    ("trainer", "policy", "model", "path"): engine.MODEL,
    ("trainer", "policy", "model", "lora", "rank"): engine.LORA_RANK,
    ("trainer", "placement", "colocate_all"): replace(
        engine.SLEEPS, why="for sleep and wake; weights go by CUDA IPC wherever trainer and engine share a GPU"
    ),
}
"""Keys outside the block that an engine needs."""
