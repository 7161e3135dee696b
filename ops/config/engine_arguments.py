"""Turns engine settings of other programs into engine.* settings: sizes, memory, dtypes, arguments."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...messages.dialects import Rule, logprob_kind
from ...worker.sglang import DP_REASON, OWNED_ARGUMENTS, PP_REASON, SGLangConfig

Told = dict[str, Any]
DTYPES = {name: name for name in ("auto", "bfloat16", "float16", "float32")}
DTYPES |= {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}


def engine_setting(name: str) -> str:
    """The setting for an SGLang argument: this package's field of that name where there is one, else extra.

    "override.NAME" is a change to the model's own configuration.
    """
    ours = name in SGLangConfig.model_fields or name.startswith("override.")
    return f"engine.{name}" if ours else f"engine.extra.{name}"


def engine(name: str, why: str = "") -> Rule:
    """One value, as it is."""
    return Rule(lambda value: {engine_setting(name): value}, why)


def when(wanted: bool, told: Told, why: str = "") -> Rule:
    """A switch that sets something in one of its positions only."""
    return Rule(lambda value: dict(told) if switch(value) is wanted else {}, why)


def switch(value: Any, allowed: str = "true or false") -> bool:
    if not isinstance(value, bool):
        raise ValueError(allowed)
    return value


def dtype(value: Any) -> Told:
    """Read a dtype in any of its usual spellings."""
    if not isinstance(value, str) or value.removeprefix("torch.") not in DTYPES:
        raise ValueError(f"one of {', '.join(DTYPES)}")
    return {"engine.dtype": DTYPES[value.removeprefix("torch.")]}


def eager(value: Any) -> Told:
    """Read eager mode: True turns CUDA graphs off."""
    off = {"engine.cuda_graph": False, "engine.prefill_cuda_graph": False}
    return off if switch(value) else {"engine.cuda_graph": True}


def max_running(value: Any) -> Told:
    """Set how many sequences are decoded at the same time, for the engine and for what its worker claims."""
    return {"worker.max_running": value, "engine.max_running": value}


def load_format(value: Any) -> Told:
    """Read a load format. VERL's dummy_* is "dummy", and waits for the trainer's first version, as VERL does; formats
    that only trainers know become "auto"."""
    if not isinstance(value, str):
        raise ValueError("auto, dummy, or a format that SGLang loads")
    if value.startswith("dummy"):
        return {"engine.load_format": "dummy", "worker.first_weights": "newest"}
    return {"engine.load_format": "auto" if value in {"hf", "megatron", "dtensor"} else value}


def _one(reason: str) -> Rule:
    def read(value: Any) -> Told:
        if value != 1 or isinstance(value, bool):
            raise ValueError(reason)
        return {}

    return Rule(read)


def _not(setting: str) -> Rule:
    return Rule(lambda value: {setting: not switch(value)})


def _experts(value: Any) -> Told:
    return {} if value == 1 else {engine_setting("ep_size"): value}


def _overrides(value: Any) -> Told:
    if not isinstance(value, Mapping):
        raise ValueError("a mapping of changes to the model's configuration")
    return {engine_setting(f"override.{name}"): item for name, item in value.items()}


def _logprob_kind(value: Any) -> Told:
    return {f"job.{path}": item for path, item in logprob_kind(value).items()}


def _model(value: Any) -> Told:
    return {"engine.model": str(Path(value).expanduser()) if isinstance(value, str) and value[:1] == "~" else value}


def _memory_saver(value: Any) -> Told:
    on = switch(value, "true or false; engine.memory_saver can be backup, too")
    return {"engine.memory_saver": "on" if on else "off"}


def off(why: str, *switches: str) -> Rule:
    """A mapping of settings that is refused where all of its `switches` are on."""

    def read(value: Any) -> Told:
        if isinstance(value, Mapping) and all(value.get(switch) for switch in switches):
            raise ValueError(f"{switches[-1]}=false: {why}")
        return {}

    return Rule(read)


def count(setting: str, why: str = "", more: int = 0, least: int = 1) -> Rule:
    """A count, which becomes the setting with so many more. least: 0 where that stands for no limit."""

    def read(value: Any) -> Told:
        return {setting: value + more} if whole(value, least) else {}

    return Rule(read, why)


def whole(value: Any, least: int = 1) -> int:
    """The value, a whole number. Raises ValueError."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"a whole number, at least {least}")
    return value


def _trainers_count(value: Any) -> Told:
    whole(value)
    return {}


def positive(values: Mapping[str, Any], key: str) -> int | None:
    """The count at a key of a block, for rules that depend on several keys; None for anything else."""
    value = values.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


EPISODES = Rule(why="how episodes are played and trained on is the trainer's")
PROMPTS = Rule(_trainers_count, "how long prompts get is the trainer's; the engine's limit is engine.context_length")
CLUSTER = Rule(why="workers are started by you, and find the pool on Redis")
ENGINES = Rule(why="engines are SGLang")
CLIENTS = Rule(why="clients are asynchronous or not, as they like")
COUNTS = Rule(why="the pool counts for itself")
MODEL = Rule(_model)
TP, PP, DP, EP = engine("tp_size"), _one(PP_REASON), _one(DP_REASON), Rule(_experts)
MEMORY = engine("mem_fraction", "of weights and KV cache together")
DTYPE, MAX_RUNNING, LOAD_FORMAT = Rule(dtype), Rule(max_running), Rule(load_format)
ROUTED_EXPERTS = when(True, {"job.routed_experts": True, "engine.routed_experts": True})
LORA_RANK = Rule(lambda value: {"engine.max_lora_rank": value} if value else {})
ROPE: Mapping[str, Rule] = {
    name: engine(f"override.{name}") for name in ("rope_scaling", "rope_theta", "rope_parameters")
}
TRAINERS: Mapping[str, Rule] = {
    "data_parallel_size": DP,
    "expert_parallel_size": EP,
    "gpu_memory_utilization": MEMORY,
    "enforce_eager": Rule(eager),
    "enable_prefix_caching": when(False, {"engine.extra.disable_radix_cache": True}),
    "enable_chunked_prefill": when(False, {"engine.extra.chunked_prefill_size": -1}),
    "max_num_batched_tokens": engine("max_prefill_tokens", "tokens of one prefill batch"),
    "max_num_seqs": MAX_RUNNING,
}
"""vLLM's arguments for which SkyRL and VERL have settings of their own."""
SLEEPS = when(True, {"engine.memory_saver": "on"})
LORA_SWITCH = Rule(why="LoRA is on where engine.max_lora_rank is set")
PARTS = Rule(why="which parts of a model are loaded is SGLang's choice")
NO_TOKENIZER = Rule(why="ids go in and out of the engine; text is the worker's edge")
_COMMON: Mapping[str, Rule] = {
    "tensor_parallel_size": TP,
    "pipeline_parallel_size": PP,
    "data_parallel_size": DP,
    "expert_parallel_size": EP,
    "dtype": DTYPE,
    "served_model_name": Rule(why="names of models are for HTTP, where no worker listens"),
    "max_lora_rank": engine("max_lora_rank"),
    "load_format": LOAD_FORMAT,
}
SGLANG: Mapping[str, Rule] = {
    **{name: Rule(refuse="RolloutMQ sets this argument of SGLang itself") for name in OWNED_ARGUMENTS},
    **{name: engine(name) for name in SGLangConfig.model_fields if name not in {"model", "extra"}},
    **_COMMON,
    "model_path": MODEL,
    "skip_tokenizer_init": NO_TOKENIZER,
    "tp_size": TP,
    "pp_size": PP,
    "dp_size": DP,
    "ep_size": EP,
    "mem_fraction_static": MEMORY,
    "max_running_requests": MAX_RUNNING,
    "enable_deterministic_inference": engine("deterministic"),
    "enable_return_routed_experts": engine("routed_experts"),
    "enable_return_hidden_states": engine("hidden_states"),
    "enable_memory_saver": Rule(_memory_saver),
    "disable_cuda_graph": _not("engine.cuda_graph"),
    "disable_prefill_cuda_graph": _not("engine.prefill_cuda_graph"),
    "disable_overlap_schedule": _not("engine.overlap_schedule"),
    "enable_lora": LORA_SWITCH,
    "enable_eplb": Rule(why="experts stay where they are, so that new weights find them: the samples are the same"),
    **dict.fromkeys(("host", "port"), Rule(why="the engine has no port")),
}
"""SGLang's own arguments that have a setting of this package, or none. All others are passed on."""
_SAME = ("trust_remote_code", "quantization", "kv_cache_dtype", "revision", "disable_custom_all_reduce")
VLLM: Mapping[str, Rule] = {
    **_COMMON,
    **TRAINERS,
    **ROPE,
    **{name: engine(name) for name in _SAME},
    "model": MODEL,
    "max_model_len": engine("context_length"),
    "enable_return_routed_experts": ROUTED_EXPERTS,
    "seed": engine("random_seed"),
    "max_loras": Rule(lambda value: {"engine.max_loras_per_batch": value + 1}, "the model alone counts as one"),
    "hf_overrides": Rule(_overrides),
    "enable_lora": LORA_SWITCH,
    "enable_sleep_mode": SLEEPS,
    "disable_log_stats": COUNTS,
    **dict.fromkeys(("disable_log_requests", "enable_log_requests"), Rule(why="requests are not logged")),
    **dict.fromkeys(("compilation_config", "gdn_prefill_backend"), Rule(why="which graphs and kernels vLLM makes")),
    "language_model_only": PARTS,
    "distributed_executor_backend": Rule(why="SGLang starts its own processes"),
    "skip_tokenizer_init": NO_TOKENIZER,
    "tokenizer": Rule(refuse="the tokenizer is the one beside the model"),
    "chat_template": Rule(refuse="the template is the one beside the model: render the text, or the ids, yourself"),
    "scheduling_policy": Rule(refuse="priority is a field of the job", unless=("fcfs",)),
    "logprobs_mode": Rule(_logprob_kind),
}
"""vLLM's arguments that SGLang can follow."""
VLLM_OTHER = "an argument of vLLM without a counterpart here; SGLang's go into engine.extra"
