"""The configuration of an SGLang engine, and its translation into SGLang's own server arguments."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ...messages.errors import ConfigError, InvalidField
from ...messages.model import Float, Int, StagingPolicy
from .wire import HEAD_LOADER

OWNED_ARGUMENTS = frozenset(
    {
        "skip_tokenizer_init",
        "custom_weight_loader",
        "model_path",
        "tokenizer_worker_num",
        "detokenizer_worker_num",
        "custom_sigquit_handler",
        "stream_interval",
        "tp_size",
        "ep_size",
        "pp_size",
        "dp_size",
        "enable_custom_logit_processor",
        "return_hidden_states_mode",
        "enable_return_hidden_states",
        "enable_return_routed_experts",
        "enable_deterministic_inference",
    }
)

MOST_IN_GRAPHS = 1024
"""Most requests of a batch that a decode graph is captured for. Each graph costs memory and time at the start.

A larger batch is decoded without graphs, on a small model at a fraction of the speed (benchmarks/README.md). SGLang's
own limit depends only on the GPU's memory (256 on an H200 with less than four ranks). Nothing larger than this was
measured.
"""
SAME_NAMES = {
    *("dtype", "tp_size", "load_format", "log_level", "context_length", "max_total_tokens"),
    *("attention_backend", "sampling_backend", "random_seed"),
}
"""Settings that have the same name in SGLang."""
CPU_DEFAULTS = {
    "attention_backend": "torch_native",  # the only one that needs no compiled CPU kernels
    "sampling_backend": "pytorch",
    # SGLang takes what other processes allocate while it loads for its own weights, and ends if that is more than this
    # share of the host's memory. max_total_tokens bounds the KV cache anyway.
    "mem_fraction_static": 0.2,
    "max_total_tokens": 65536,
    "max_running_requests": 256,
}
"""What is best on a CPU unless the configuration says otherwise."""

LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


PP_REASON = (
    "only 1: ranks of a version's transfer are tensor-parallel ranks, and every pipeline stage has each of them again; "
    "split the model by tp_size"
)
DP_REASON = (
    "only 1: every replica would have the same tensor-parallel ranks; what is data parallel is the pool: start a "
    "worker for each replica"
)

NODES_REASON = (
    "only 1: the worker reaches its engine's processes through sockets of its own host; split the model over the GPUs "
    "of one host by tp_size"
)
EPLB_REASON = (
    "only False: experts that move while the engine serves would be somewhere else than where the copy plan of the "
    "first version writes them"
)
STORAGES = ("hicache_storage_backend", "enable_lmcache", "enable_flexkv", "enable_unified_cache_external_linker")
STORAGE_REASON = (
    "none: a storage names pages by their tokens alone, so it would give back what other weights had computed; the "
    "memories of device and host (enable_hierarchical_cache) keep versions apart"
)


class SGLangConfig(BaseModel):
    """Settings of one SGLang engine. Each field is a key of a configuration file and, by `ops.flags`, a flag of the
    worker's command. None leaves SGLang's default, except where said otherwise.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    model: str = Field(min_length=1)
    """Directory or hub name that SGLang loads; its weights are version 0."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Type of weights and computation: auto (what the model says), bfloat16, float16 or float32."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto (a GPU if there is one), cpu or cuda."""
    tp_size: Int = Field(default=1, ge=1)
    """Tensor-parallel size: GPUs that one engine is split over."""
    ep_size: Int = Field(default=1, ge=1)
    """Expert-parallel size: ranks that the experts of a layer are spread over; divides the tensor-parallel size."""
    pp_size: Int = Field(default=1, ge=1)
    """Pipeline-parallel size; only 1 is supported."""
    dp_size: Int = Field(default=1, ge=1)
    """Data-parallel size; only 1: start a worker for each replica."""
    max_running: Int | None = Field(default=None, ge=1)
    """Most requests decoded at the same time."""
    context_length: Int | None = Field(default=None, ge=16)
    """Most tokens of prompt and output together that SGLang is told. It keeps a few for itself."""
    mem_fraction: Float | None = Field(default=None, gt=0.0, lt=1.0)
    """Share of device memory for weights and KV cache; on a CPU 0.2 of the host's memory."""
    max_total_tokens: Int | None = Field(default=None, ge=64)
    """Size of the KV cache in tokens; on a CPU 65536."""
    load_format: str = "auto"
    """auto loads the checkpoint; dummy starts from random weights: for benchmarks, and with `first_weights` newest
    where the trainer publishes the first version."""
    attention_backend: str | None = None
    """SGLang's name; default: its own choice."""
    sampling_backend: str | None = None
    """SGLang's name; default: its own choice."""
    cuda_graph: bool = True
    """Capture CUDA graphs for decoding, for at most 1024 requests (takes seconds)."""
    prefill_cuda_graph: bool = True
    """Capture CUDA graphs for prefill (up to a minute at the start); never with a memory_saver."""
    overlap_schedule: bool | None = None
    """Prepare the next batch while the current one runs; default: on GPUs only, since on a CPU both need the same
    cores."""
    random_seed: Int | None = Field(default=None, ge=0)
    """Seed of SGLang's sampling."""
    cpu_threads: Int | None = Field(default=None, ge=1)
    """torch's threads in the scheduler process on a CPU; default: 1. More slow down every other process on the same
    cores."""
    staging: StagingPolicy = "auto"
    """Receive new weights beside those that serve, so that an update's pause is a local copy: auto (where the GPU has
    room; not with tensor parallelism), on (insist) or off. A CPU always stages."""
    max_lora_rank: Int | None = Field(default=None, ge=1, le=4096)
    """Take LoRA adapters up to this rank (GPUs only); default: no adapter can be used."""
    lora_target_modules: tuple[str, ...] = Field(default=LORA_TARGETS, min_length=1)
    """Module that adapters may change, by PEFT's name; repeatable. An adapter for others is refused."""
    max_loras_per_batch: Int = Field(default=8, ge=2)
    """Most adapter versions that run in one batch; the model alone counts as one, an adapter has two during an update.
    Each takes GPU memory for the full rank."""
    hidden_states: bool = False
    """Keep the model's last hidden states, so that jobs may ask for them."""
    routed_experts: bool = False
    """Keep which experts each token goes to, so that jobs may ask for it (GPUs only)."""
    deterministic: bool = False
    """Honour the seeds of jobs; a token does not depend on its batch. Slower on a GPU, and min_p is refused."""
    logit_processors: dict[str, str] = Field(default_factory=dict)
    """A logit processor of your own, NAME=MODULE:CLASS; repeatable."""
    task: Literal["generate", "embed", "reward"] = "generate"
    """generate; or embed or reward, for a model that pools what it reads."""
    memory_saver: Literal["off", "on", "backup"] = "off"
    """off, on or backup: the engine can sleep (GPUs only; needs torch-memory-saver). backup keeps sleeping weights in
    host memory: they wake as they were."""
    tokenizer: Literal["auto", "on", "off"] = "auto"
    """Give the engine the model's tokenizer, which stop texts, stop_regex and grammars need: auto (if it has one), on
    (insist) or off."""
    cache_dir: str | None = Field(default=None, min_length=1)
    """Folder that keeps what a start compiles (kernels and graphs of torch, Triton, FlashInfer, SGLang) for the next
    one; several workers may share it."""
    log_level: Literal["debug", "info", "warning", "error", "critical"] = "error"
    """Log level of the processes that SGLang starts."""
    extra: dict[str, Any] = Field(default_factory=dict)
    """Further SGLang server argument, NAME=JSON; repeatable. Wins over the settings above."""


def server_arguments(config: SGLangConfig, device: Literal["cpu", "cuda"], weight_loader: str) -> dict[str, Any]:
    """Return SGLang's server arguments for `config` on `device`.

    weight_loader: dotted path of the function that receives weights inside the engine.

    Raises ConfigError if a setting needs a GPU and there is none, InvalidField for sizes that weight sync does not
    support, and what `check_extra` raises.
    """
    check_parallelism(tp=config.tp_size, pp=config.pp_size, dp=config.dp_size, ep=config.ep_size)
    check_extra(config.extra)
    arguments: dict[str, Any] = {
        **config.model_dump(include=SAME_NAMES),
        "model_path": config.model,
        "skip_tokenizer_init": True,  # tokens in, tokens out: the worker makes the text
        "custom_weight_loader": [weight_loader],
        "device": device,
        "ep_size": config.ep_size if config.ep_size > 1 else None,
        # Without it an idle scheduler's loop takes the interpreter from the thread that receives a version.
        "sleep_on_idle": True,
        "disable_cuda_graph": not config.cuda_graph,
        "disable_prefill_cuda_graph": not config.prefill_cuda_graph,
        "disable_overlap_schedule": not (
            device == "cuda" if config.overlap_schedule is None else config.overlap_schedule
        ),
        "max_running_requests": config.max_running,
        "cuda_graph_max_bs_decode": None
        if device == "cpu" or config.max_running is None
        else min(config.max_running, MOST_IN_GRAPHS),
        "mem_fraction_static": config.mem_fraction,
        # It costs nothing in a batch without one. The class is this program's own (calls/ask.py).
        "enable_custom_logit_processor": True,
        "return_hidden_states_mode": "last" if config.hidden_states else None,
        "enable_return_routed_experts": config.routed_experts or None,
        "enable_deterministic_inference": config.deterministic or None,
    }
    if config.extra.get("schedule_policy", "fcfs") in ("fcfs", "lof"):  # what runs is not preempted: it has its memory
        arguments |= {
            "enable_priority_scheduling": True,
            "disable_priority_preemption": True,
            "default_priority_value": 0,
        }
    if config.task != "generate":
        if config.max_lora_rank is not None:
            raise ConfigError(f"max_lora_rank={config.max_lora_rank}: adapters are for task='generate'")
        # Requests of a pooling engine carry no cache key. With a prefix cache they could reuse a prefix of older
        # weights.
        arguments |= {"is_embedding": True, "disable_radix_cache": True}
        if config.task == "reward":
            arguments["custom_weight_loader"] = [weight_loader, HEAD_LOADER]
    if config.max_lora_rank is not None:
        if device == "cpu":
            raise ConfigError(f"max_lora_rank={config.max_lora_rank}: SGLang runs LoRA adapters on GPUs only")
        arguments |= {
            "enable_lora": True,
            "max_lora_rank": config.max_lora_rank,
            "lora_target_modules": list(config.lora_target_modules),
            "max_loras_per_batch": config.max_loras_per_batch,
        }
    if config.memory_saver != "off":
        if device == "cpu":
            raise ConfigError(f"memory_saver={config.memory_saver!r}: SGLang gives memory back on GPUs only")
        arguments |= {"enable_memory_saver": True, "enable_weights_cpu_backup": config.memory_saver == "backup"}
        arguments["disable_prefill_cuda_graph"] = True  # SGLang's prefill graphs refuse to start with it
    arguments = {name: value for name, value in arguments.items() if value is not None}
    if device == "cpu":
        # SGLang counts memory that other processes allocate while it starts as its own. A KV cache whose size is given
        # needs no tight limit.
        limit = {} if config.max_total_tokens is None else {"mem_fraction_static": 0.5}
        never = {"disable_cuda_graph": True, "disable_prefill_cuda_graph": True}
        arguments = CPU_DEFAULTS | limit | arguments | never
    return arguments | config.extra


def may_begin_empty(config: SGLangConfig) -> bool:
    """Whether a whole version replaces all that the checkpoint would have brought into this engine.

    Not so for models whose loader does more than copying, for a second model (speculative decoding), for heads that a
    version may lack, and for a model that is not in a folder here, of which that is not known.
    """
    if config.task != "generate" or config.load_format != "auto":
        return False
    if {"quantization", "load_format", "speculative_algorithm", "model_loader_extra_config"} & config.extra.keys():
        return False
    try:
        told = json.loads((Path(config.model) / "config.json").read_bytes())
        texts = [told, told.get("text_config") or {}]
        return not any({"quantization_config", "compression_config"} & one.keys() for one in texts)
    except (OSError, ValueError, AttributeError):
        return False


def check_parallelism(*, tp: int = 1, pp: int = 1, dp: int = 1, ep: int = 1) -> None:
    """Check parallel sizes. Raises InvalidField, with the reason, for those that weight sync does not support.

    Every scheduler process of an engine receives a version under its tensor-parallel rank. So tensor parallelism works,
    and expert parallelism, which spreads experts over the same ranks. Pipeline stages, and the replicas of SGLang's own
    data parallelism, use each of those ranks more than once.

    tp: tensor-parallel size. pp: pipeline stages. dp: SGLang's data-parallel replicas inside one engine. ep: how many
    of the tensor-parallel ranks the experts of a layer are spread over; it divides tp.
    """
    for name, size in (("tp_size", tp), ("pp_size", pp), ("dp_size", dp), ("ep_size", ep)):
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise InvalidField(name, size, "a count, at least 1")
    if pp > 1:
        raise InvalidField("pp_size", pp, PP_REASON)
    if dp > 1:
        raise InvalidField("dp_size", dp, DP_REASON)
    if tp % ep:
        raise InvalidField("ep_size", ep, f"a divisor of tp_size={tp}: experts are spread over tensor-parallel ranks")


def check_extra(extra: Mapping[str, Any]) -> None:
    """Check SGLang's own arguments. Raises ConfigError for one that this package sets itself.

    Raises InvalidField for an engine over several hosts and for experts that move, which would break weight sync, and
    for a storage of prefixes, which does not know versions.
    """
    if owned := sorted(OWNED_ARGUMENTS & extra.keys()):
        raise ConfigError(f"extra={owned}: RolloutMQ sets these arguments itself")
    if (nodes := extra.get("nnodes", 1)) != 1:
        raise InvalidField("extra.nnodes", nodes, NODES_REASON)
    if eplb := extra.get("enable_eplb"):
        raise InvalidField("extra.enable_eplb", eplb, EPLB_REASON)
    for name in STORAGES:
        if storage := extra.get(name):
            raise InvalidField(f"extra.{name}", storage, STORAGE_REASON)
