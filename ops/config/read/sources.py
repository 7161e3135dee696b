"""Settings from environment variables and from the flags of a command."""

from __future__ import annotations

import json
import types
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from ....messages.dialects import collect
from ....messages.errors import ConfigError
from ....messages.nearest import nearest
from ....sync.transfer import SyncSettings
from ....worker.config import WorkerConfig
from ....worker.sglang.config import SGLangConfig
from ...cli.options import parse_extra
from ..settings import PLAIN_JOB, SECTIONS, Setting, Settings, known_names

WORKER_FLAGS: Mapping[str, tuple[str, ...]] = {
    "model": ("engine.model",),
    "redis": ("worker.redis_url",),
    "pool": ("worker.pool",),
    "dtype": ("engine.dtype",),
    "device": ("engine.device",),
    "tp": ("engine.tp_size",),
    "ep": ("engine.ep_size",),
    "max_running": ("worker.max_running", "engine.max_running"),
    "prefetch": ("worker.prefetch",),
    "lease": ("worker.lease_s",),
    "checkpoint": ("worker.checkpoint_s",),
    "drain": ("worker.drain_s",),
    "max_lost": ("worker.max_lost",),
    "snapshots": ("worker.snapshots",),
    "media_host": ("worker.media_hosts",),
    "context_length": ("engine.context_length",),
    "mem_fraction": ("engine.mem_fraction",),
    "max_total_tokens": ("engine.max_total_tokens",),
    "staging": ("engine.staging",),
    "load_format": ("engine.load_format",),
    "attention_backend": ("engine.attention_backend",),
    "sampling_backend": ("engine.sampling_backend",),
    "cuda_graph": ("engine.cuda_graph",),
    "prefill_cuda_graph": ("engine.prefill_cuda_graph",),
    "cpu_threads": ("engine.cpu_threads",),
    "task": ("engine.task",),
    "max_lora_rank": ("engine.max_lora_rank",),
}
"""Parameters of `rolloutmq worker` and the settings they are. `sglang` and
`logit_processor` are read apart; `config` and `log_level` are
none. One that is not here is taken for the setting worker.<name> or engine.<name>, whichever there is."""
NO_SETTINGS = frozenset({"config", "log_level", "sglang", "context", "logit_processor"})
SHORT = {"ROLLOUTMQ_REDIS": "worker.redis_url", "ROLLOUTMQ_POOL": "worker.pool"}


def from_environment(environment: Mapping[str, str]) -> Iterator[tuple[str, Setting]]:
    """(name, setting) for ROLLOUTMQ_REDIS, ROLLOUTMQ_POOL and every ROLLOUTMQ_<SECTION>_<NAME>.

    Values are JSON, or text where the setting is one. Raises ConfigError naming the variable if there is no such
    setting, with the nearest ones; InvalidField for a sampling parameter that cannot be.
    """
    for variable, name in SHORT.items():
        if environment.get(variable):
            yield name, Setting(environment[variable], f"environment {variable}")
    for variable in sorted(environment):
        prefix, _, rest = variable.partition("_")
        section, _, name = rest.lower().partition("_")
        if prefix != "ROLLOUTMQ" or section not in SECTIONS or not name:
            continue
        source, text = f"environment {variable}", environment[variable]
        if section in {"job", "eval"}:
            for path, value in job_values({name: _json(text)}, source=source).items():
                yield f"{section}.{path}", Setting(value, source)
        elif section == "engine" and name == "extra":
            extra = _json(text)
            if not isinstance(extra, dict):
                raise ConfigError(f"{variable}={text!r}: a JSON object of SGLang arguments is needed")
            for argument, value in extra.items():
                yield f"engine.extra.{argument}", Setting(value, source)
        elif name not in known_names(section):
            known = [f"ROLLOUTMQ_{section}_{other}".upper() for other in known_names(section)]
            raise ConfigError(f"{variable}: no such setting{nearest(variable, known)}")
        else:
            yield f"{section}.{name}", Setting(text if _is_text(section, name) else _json(text), source)


def job_values(given: Mapping[str, Any], source: str) -> dict[str, Any]:
    """A native job section: fields of a job, sampling parameters of any dialect among them, as names below it.

    Raises InvalidField, ConfigError.
    """
    plain = {name: given[name] for name in given if name in PLAIN_JOB}
    found = collect({name: value for name, value in given.items() if name not in plain})
    for error in found.errors.values():
        raise ConfigError(f"{source}: {error}")
    return plain | {path: value for path, (value, _) in found.fields.items()}


def from_flags(context: Any) -> Iterator[tuple[str, Setting]]:
    """(name, setting) for the flags of `rolloutmq worker` that somebody typed; defaults and environment say nothing.

    context: the command's click or typer context. Raises ConfigError for an SGLang argument without a value.
    """
    for parameter, value in context.params.items():
        source = context.get_parameter_source(parameter)
        if source is None or source.name not in {"COMMANDLINE", "PROMPT"} or value is None:
            continue
        flag = f"flag --{parameter.replace('_', '-')}"
        if parameter == "sglang":
            for name, item in parse_extra(list(value)).items():
                yield f"engine.extra.{name}", Setting(item, flag)
        if parameter == "logit_processor":
            own = {name: str(item) for name, item in parse_extra(list(value)).items()}
            yield "engine.logit_processors", Setting(own, flag)
        if parameter in NO_SETTINGS:
            continue
        for name in WORKER_FLAGS.get(parameter) or _by_name(parameter):
            yield name, Setting(str(value) if name == "worker.snapshots" else value, flag)


def apply(settings: Settings, found: Iterator[tuple[str, Setting]]) -> None:
    """Put settings on top of those there are."""
    for name, setting in found:
        settings.put(name, setting.value, setting.source)


def _by_name(parameter: str) -> tuple[str, ...]:
    found = tuple(f"{section}.{parameter}" for section in ("worker", "engine") if parameter in known_names(section))
    if not found:
        raise ConfigError(f"--{parameter.replace('_', '-')}: WORKER_FLAGS does not say which setting this flag is")
    return found


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _is_text(section: str, name: str) -> bool:
    models: Mapping[str, type[BaseModel]] = {"worker": WorkerConfig, "engine": SGLangConfig, "publisher": SyncSettings}
    return _takes_text(models[section].model_fields[name].annotation)


def _takes_text(annotation: Any) -> bool:
    if get_origin(annotation) in {Union, types.UnionType}:
        return any(_takes_text(part) for part in get_args(annotation))
    return annotation is str or get_origin(annotation) is Literal
