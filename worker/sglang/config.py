"""How an SGLang engine is configured, and what that means as SGLang's own server arguments."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ...messages.errors import ConfigError
from ...messages.model import StagingPolicy
from .parallel import check_parallelism
from .reward_head import LOADER as HEAD_LOADER

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
"""Requests of a batch. Each graph costs memory and time at the start; nothing larger has been measured."""

LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class SGLangConfig(BaseModel):
    """One SGLang engine. None leaves SGLang's default, except where said otherwise.

    model: a directory or hub name that SGLang loads.
    dtype: of the weights and the computation; "auto" is what the model's own configuration says.
    device: "auto" takes a GPU if there is one, else the CPU.
    tp_size: GPUs that one engine is split over. ep_size: how many of these ranks the experts of a layer are spread
        over. pp_size, dp_size: only 1, see sglang_parallel.
    max_running: most requests decoded at the same time.
    context_length: most tokens of prompt and output together that SGLang is told. It keeps a few for itself, so the
        engine's `info.context_length` is a little smaller.
    mem_fraction: share of the device's memory for weights and KV cache; on a CPU 0.05 of the host's memory.
    max_total_tokens: size of the KV cache in tokens; on a CPU 65536.
    load_format: "auto" loads the checkpoint, "dummy" starts from random weights (for benchmarks, or where the first
        weights come from the trainer anyway).
    cuda_graph, prefill_cuda_graph: capture graphs at start. Decode graphs, for up to `max_running` requests and at most
        1024, take seconds, prefill graphs up to a minute.
    overlap_schedule: prepare the next batch while the current one runs; off on a CPU, where both need the same cores.
    cpu_threads: torch's threads in the scheduler process on a CPU, 1 by default. On small models a second one loses
        at 1 and 64 requests and wins a quarter at 256, and it slows down every other process on the same cores.
    staging: "auto" receives new weights beside the ones that serve where the GPU has the memory (as much as the weights
        take), so that an update's pause is a local copy; "off" receives them while generation stands still; "on"
        insists. Leave the room by `mem_fraction`. A CPU always stages, and "auto" is "off" with tensor parallelism.
    max_lora_rank: most rank of a LoRA adapter, on GPUs; None starts SGLang without LoRA: no adapter can be used.
    lora_target_modules: modules that adapters may change, by the names PEFT uses; an adapter for others is refused.
    max_loras_per_batch: most adapter versions that run in one batch, the model alone counting as one. Each takes GPU
        memory for `max_lora_rank`. During an update an adapter has two.
    hidden_states: keep the model's last hidden states, so that a job can ask for them; off, such a job is refused.
    routed_experts: keep which experts each token goes to, likewise, for mixtures of experts on GPUs.
    deterministic: seeds of jobs are honoured, and a token does not depend on what else is in its batch (up to rounding
        on a CPU); slower on a GPU. min_p is refused then.
    logit_processors: processors of your own, name -> "module:Class"; jobs can ask for them by name, see docs/logits.md.
    task: "generate", or "embed" or "reward" for a model that pools what it reads and generates nothing.
    memory_saver: the engine can give its GPU's memory up and take it again (`rolloutmq control sleep`); needs the
        package torch-memory-saver. "backup" keeps a copy of sleeping weights in host memory: they wake as they were.
    tokenizer: "auto" gives the engine the model's tokenizer if it has one, "on" insists, "off" is without: no stop
        texts, no stop_regex, no grammars. Tokens go in and come out in any case.
    log_level: of the processes SGLang starts.
    extra: further SGLang server arguments, by their names; these win over the fields above.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = Field(min_length=1)
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    tp_size: int = Field(default=1, ge=1)
    ep_size: int = Field(default=1, ge=1)
    pp_size: int = Field(default=1, ge=1)
    dp_size: int = Field(default=1, ge=1)
    max_running: int | None = Field(default=None, ge=1)
    context_length: int | None = Field(default=None, ge=16)
    mem_fraction: float | None = Field(default=None, gt=0.0, lt=1.0)
    max_total_tokens: int | None = Field(default=None, ge=64)
    load_format: str = "auto"
    attention_backend: str | None = None
    sampling_backend: str | None = None
    cuda_graph: bool = True
    prefill_cuda_graph: bool = True
    overlap_schedule: bool | None = None
    random_seed: int | None = Field(default=None, ge=0)
    cpu_threads: int | None = Field(default=None, ge=1)
    staging: StagingPolicy = "auto"
    max_lora_rank: int | None = Field(default=None, ge=1, le=4096)
    lora_target_modules: tuple[str, ...] = Field(default=LORA_TARGETS, min_length=1)
    max_loras_per_batch: int = Field(default=8, ge=2)
    hidden_states: bool = False
    routed_experts: bool = False
    deterministic: bool = False
    logit_processors: dict[str, str] = Field(default_factory=dict)
    task: Literal["generate", "embed", "reward"] = "generate"
    memory_saver: Literal["off", "on", "backup"] = "off"
    tokenizer: Literal["auto", "on", "off"] = "auto"
    log_level: Literal["debug", "info", "warning", "error", "critical"] = "error"
    extra: dict[str, Any] = Field(default_factory=dict)


def server_arguments(config: SGLangConfig, device: Literal["cpu", "cuda"], weight_loader: str) -> dict[str, Any]:
    """SGLang's server arguments for `config` on `device`.

    weight_loader: dotted path of the function that receives weights inside the engine.

    Raises ConfigError if `extra` names an argument that this package sets itself, or for LoRA on a CPU; InvalidField
    for sizes that weight sync cannot follow.
    """
    check_parallelism(tp=config.tp_size, pp=config.pp_size, dp=config.dp_size, ep=config.ep_size)
    owned = sorted(OWNED_ARGUMENTS & config.extra.keys())
    if owned:
        raise ConfigError(f"extra={owned}: RolloutMQ sets these arguments itself")
    arguments: dict[str, Any] = {
        "model_path": config.model,
        "skip_tokenizer_init": True,  # tokens in, tokens out: text is the worker's edge
        "custom_weight_loader": [weight_loader],
        "dtype": config.dtype,
        "device": device,
        "tp_size": config.tp_size,
        "ep_size": config.ep_size if config.ep_size > 1 else None,
        "load_format": config.load_format,
        "log_level": config.log_level,
        # Else an idle scheduler's loop takes the interpreter from the thread that receives a version.
        "sleep_on_idle": True,
        "disable_cuda_graph": not config.cuda_graph,
        "disable_prefill_cuda_graph": not config.prefill_cuda_graph,
        "disable_overlap_schedule": not (
            device == "cuda" if config.overlap_schedule is None else config.overlap_schedule
        ),
        "max_running_requests": config.max_running,
        "cuda_graph_max_bs_decode": _most_in_graphs(config) if device == "cuda" else None,
        "context_length": config.context_length,
        "mem_fraction_static": config.mem_fraction,
        "max_total_tokens": config.max_total_tokens,
        "attention_backend": config.attention_backend,
        "sampling_backend": config.sampling_backend,
        "random_seed": config.random_seed,
        # Costs nothing in a batch without one; classes come from this program alone (see sglang_marker).
        "enable_custom_logit_processor": True,
        "return_hidden_states_mode": "last" if config.hidden_states else None,
        "enable_return_routed_experts": config.routed_experts or None,
        "enable_deterministic_inference": config.deterministic or None,
    }
    if config.task != "generate":
        if config.max_lora_rank is not None:
            raise ConfigError(f"max_lora_rank={config.max_lora_rank}: adapters are for task='generate'")
        # Its requests carry no cache key, so a prefix of older weights could be found again.
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
    arguments = {name: value for name, value in arguments.items() if value is not None}
    if device == "cpu":
        arguments = _cpu_defaults(config) | arguments | _cpu_musts()
    return arguments | config.extra


def _most_in_graphs(config: SGLangConfig) -> int | None:
    """SGLang's own limit goes by the GPU's memory (256 on an H200 with less than four ranks), whatever was asked for: a
    larger batch is decoded without graphs, a small model's at a fraction of the speed (docs/benchmarks.md).
    """
    return None if config.max_running is None else min(config.max_running, MOST_IN_GRAPHS)


def _cpu_defaults(config: SGLangConfig) -> dict[str, Any]:
    """What is best on a CPU unless the configuration says otherwise."""
    return {
        "attention_backend": "torch_native",  # the only one that needs no compiled CPU kernels
        "sampling_backend": "pytorch",
        "mem_fraction_static": 0.05,
        "max_total_tokens": 65536,
        "max_running_requests": 256,
        "sleep_on_idle": True,  # an idle scheduler otherwise spins on a core that another engine could use
    }


def _cpu_musts() -> dict[str, Any]:
    return {"disable_cuda_graph": True, "disable_prefill_cuda_graph": True}
