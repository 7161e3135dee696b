"""VERL's `rollout:` block (actor_rollout_ref.rollout).

Keys are those of verl/trainer/config/rollout/rollout.yaml, of the generated trainer configurations, and of the
dataclasses in verl/workers/config/rollout.py; some are older and no longer there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...messages.dialects import RULES, Rule
from . import engine_arguments as engine
from .engine_arguments import SGLANG, Told, off, positive, when
from .translate import Arguments, Sampling, Table

_TRAINER = Rule(why="about the trainer's own forward passes")
_TRACES = Rule(why="VERL's own traces and dumps are written by VERL")
_SLEEP = Rule(why="an engine sleeps and wakes when it is told to, if free_cache_engine is on")
_PROCESS = Rule(why="workers hold their engine in their own process")
_CHECKPOINT_ENGINE = Rule(why="for VERL's own checkpoint engine")
_TARGET = Rule(why="the class that Hydra would make of it")


def job(name: str) -> Rule:
    """A sampling parameter, read by the same rules as in a job."""

    def read(value: Any) -> Told:
        reader = RULES[name].read
        assert reader is not None
        told = reader(value)
        if "greedy" in told:
            return {"job.sampling.temperature": 0.0}
        return {f"job.{path}": item for path, item in told.items()}

    return Rule(read)


def _megabytes(value: Any) -> Told:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError("megabytes, at least 1")
    return {"publisher.bucket_bytes": value << 20}


def _images(value: Any) -> Told:
    return {"engine.extra.limit_mm_data_per_request": {"image": engine.whole(value, 0)}}


KEPT = 6
"""Tokens of its context that SGLang keeps for itself."""


def _lengths(block: Mapping[str, Any]) -> Rule:
    """What prompt_length says of the longest prompt and answer together."""
    prompt, answer = positive(block, "prompt_length"), positive(block, "response_length")
    if prompt is None or answer is None:
        return engine.PROMPTS
    arguments = block.get("engine_kwargs")
    own = arguments.get("sglang") if isinstance(arguments, Mapping) else None
    given = block.get("max_model_len") is not None or (isinstance(own, Mapping) and "context_length" in own)
    # Where verl composed the file its servers read null as the model's own context, and so do engines here.
    told = {} if given or "_target_" in block else {"engine.context_length": prompt + answer + KEPT}
    if _turns(block) is not None:
        told["episodes.tokens"] = prompt + answer
    return Rule(
        lambda _: told,
        "the longest prompt and answer" if told else "an engine takes max_model_len, or all the model can",
    )


def _turns(block: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The settings of conversations of many turns; None where they are off."""
    given = block.get("multi_turn")
    return given if isinstance(given, Mapping) and given.get("enable") is True else None


DEFAULTS: Mapping[str, Told] = {
    "format": {"job.tool_parser": "hermes", "eval.tool_parser": "hermes"},
    "max_parallel_calls": {"tools.max_parallel_calls": 1},
    "max_tool_response_length": {"tools.max_response_length": 256},
}
"""VERL's own of `multi_turn`, where a file leaves them out."""


def _multi_turn(block: Mapping[str, Any]) -> Table:
    given = _turns(block)
    if given is None:
        single = Rule(why="one turn only: multi_turn.enable is not true")
        return {**dict.fromkeys(MULTI_TURN, single), "enable": when(True, {}, single.why)}
    answers, users = positive(given, "max_assistant_turns"), positive(given, "max_user_turns")
    users_first = users is not None and (answers is None or users + 1 < answers)
    sooner = Rule(why="the other limit of turns comes first")
    told = {name: value for key, some in DEFAULTS.items() if key not in given for name, value in some.items()}
    if answers is None and users is None and (most := positive(block, "response_length")):
        told["episodes.turns"] = most  # no limit but this, of a token for each turn
    enable = Rule(lambda _: told, "with VERL's defaults where nothing is said")
    return {
        "_target_": _TARGET,
        "enable": enable,
        "max_assistant_turns": sooner if answers and users_first else engine.count("episodes.turns", least=0),
        "max_user_turns": sooner
        if users and not users_first
        else engine.count("episodes.turns", "an answer to the prompt, and one to each", more=1, least=0),
        "max_parallel_calls": engine.count("tools.max_parallel_calls"),
        "max_tool_response_length": engine.count("tools.max_response_length", "characters"),
        "tool_response_truncate_side": Rule(lambda value: {"tools.truncate_side": value}),
        "tool_config_path": Rule(lambda value: {"tools.path": value}),
        "function_tool_path": Rule(why="functions are named in tool_config_path, as class_path"),
        "interaction_config_path": Rule(why="what answers the model is the environment that client.episodes gets"),
        "format": Rule(lambda value: {"job.tool_parser": value, "eval.tool_parser": value}),
        **dict.fromkeys(
            ("use_inference_chat_template", "tokenization_sanity_check_mode"),
            Rule(why="a turn goes on behind the tokens that were sampled: nothing is tokenised again"),
        ),
        "num_repeat_rollouts": engine.EPISODES,
    }


def table(block: Mapping[str, Any]) -> Table:
    """The rules for a `rollout:` block."""
    greedy = block.get("do_sample") is False
    standalone = block.get("standalone_gpu_memory_utilization") is not None
    return {
        **engine.TRAINERS,
        **({"gpu_memory_utilization": Rule(why="standalone_gpu_memory_utilization holds")} if standalone else {}),
        "standalone_gpu_memory_utilization": engine.MEMORY,
        "_target_": _TARGET,
        "name": engine.ENGINES,
        "mode": engine.CLIENTS,
        **dict.fromkeys(("nnodes", "n_gpus_per_node", "router_config_path"), engine.CLUSTER),
        # what is sampled
        "temperature": Rule(why="do_sample=false is greedy, whatever this says") if greedy else job("temperature"),
        **{name: job(name) for name in _SAMPLED},
        "sampling_kwargs": Sampling("job", "verl"),
        "prompt_length": _lengths(block),
        "calculate_log_probs": job("return_logprob"),
        "enable_rollout_routing_replay": engine.ROUTED_EXPERTS,
        "val_kwargs": Sampling("eval", "verl"),
        # engines
        "dtype": engine.DTYPE,
        "cudagraph_capture_sizes": Rule(why="for vLLM; SGLang captures what max_running needs"),
        "tensor_model_parallel_size": engine.TP,
        "pipeline_model_parallel_size": engine.PP,
        "moe_tensor_parallel_size": Rule(
            refuse="for TensorRT-LLM; experts are spread by expert_parallel_size", unless=(1,)
        ),
        "max_model_len": engine.engine("context_length"),
        "scheduling_policy": Rule(refuse="priority is a field of the job", unless=("fcfs",)),
        "load_format": engine.LOAD_FORMAT,
        "seed": engine.engine("random_seed"),
        "full_determinism": when(True, {"engine.deterministic": True}),
        "quantization": engine.engine("quantization"),
        "quantization_config_file": Rule(refuse="say it as engine.extra, in SGLang's terms"),
        "qat": off("engines serve weights in the dtype they are sent in", "enable"),
        "mtp": off("the weights of a draft model would not be updated", "enable", "enable_rollout"),
        "disaggregation": off("prefill and decoding run in one engine here", "enabled"),
        "limit_images": Rule(_images),
        "skip_tokenizer_init": engine.NO_TOKENIZER,
        "engine_kwargs": {
            "sglang": Arguments(SGLANG),
            **dict.fromkeys(("vllm", "trtllm"), engine.ENGINES),
            "rolloutmq": Rule(why="for verl's side of the pool"),
        },
        "disable_log_stats": engine.COUNTS,
        "prometheus": engine.COUNTS,
        **dict.fromkeys(("sglang_engine_mode", "sglang_rollout_mode"), _PROCESS),
        "server": Rule(why="there is no server between client and engine: retries are the broker's"),
        "free_cache_engine": Rule(why="standalone engines do not sleep") if standalone else engine.SLEEPS,
        **dict.fromkeys(("enable_sleep_mode", "multi_stage_wake_up"), _SLEEP),
        "use_preprocessed_multimodal_input": Rule(why="for vLLM"),
        # weights
        "checkpoint_engine": {
            "_target_": _TARGET,
            "backend": Rule(why="NCCL, CUDA IPC or TCP, as the hosts have it"),
            "update_weights_bucket_megabytes": Rule(_megabytes),
            "engine_kwargs": _CHECKPOINT_ENGINE,
            "custom_backend_module": _CHECKPOINT_ENGINE,
        },
        "update_weights_bucket_megabytes": Rule(_megabytes),
        "checkpoint_manager_class": _CHECKPOINT_ENGINE,
        "layered_summon": Rule(why="tensors are gathered one at a time anyway"),
        "layer_name_map": Rule(why="names are mapped by WeightPublisher(rename=...)"),
        "use_shm": Rule(why="models are loaded from where they are"),
        # the trainer's
        "over_sample_rate": Rule(lambda value: {"group.over_sample_rate": value}, "what a feed's batch can do without"),
        **dict.fromkeys(_FORWARD, _TRAINER),
        "custom": engine.EPISODES,
        "multi_turn": _multi_turn(block),
        "agent": dict.fromkeys(AGENT, engine.EPISODES),
        **dict.fromkeys(("trace", "skip"), _TRACES),
        **dict.fromkeys(("skip_rollout", "skip_dump_dir"), _TRACES),
        "profiler": Rule(why="an engine is profiled when it is told to, it is no setting"),
    }


_SAMPLED = ("top_k", "top_p", "repetition_penalty", "do_sample", "ignore_eos", "n", "response_length", "logprobs_mode")
_FORWARD = (
    *("log_prob_micro_batch_size", "log_prob_micro_batch_size_per_gpu", "log_prob_use_dynamic_bsz"),
    *("log_prob_max_token_len_per_gpu", "moe_load_balance_metrics_interval"),
)
MULTI_TURN = (
    *("_target_", "enable", "format", "max_assistant_turns", "max_user_turns", "max_parallel_calls"),
    *("tool_config_path", "function_tool_path", "interaction_config_path", "max_tool_response_length"),
    *("tool_response_truncate_side", "use_inference_chat_template", "tokenization_sanity_check_mode"),
    "num_repeat_rollouts",
)
AGENT = (
    *("_target_", "num_workers", "default_agent_loop", "agent_loop_config_path", "custom_async_server"),
    "agent_loop_manager_class",
)
BESIDE: Mapping[tuple[str, ...], Rule] = {
    ("model_path",): engine.MODEL,
    ("actor_rollout_ref", "model", "path"): engine.MODEL,
    ("actor_rollout_ref", "model", "trust_remote_code"): when(True, {"engine.extra.trust_remote_code": True}),
    ("actor_rollout_ref", "model", "lora_rank"): engine.LORA_RANK,
}
"""Keys outside the block that an engine needs."""
