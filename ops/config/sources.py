"""Settings from environment variables and from the flags of a command."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from ...messages.dialects import collect
from ...messages.errors import ConfigError
from ...messages.nearest import nearest
from ..flags import Flag, flags_of, json_or_text, takes_text
from .settings import MODELS, PLAIN_JOB, SECTIONS, Setting, Settings, known_names

FLAG_OF = {"extra": "sglang", "log_level": "engine_log_level"}
"""Flags that are not called like their field: `--log-level` of the command is the worker's own."""
WITHOUT_FLAG = frozenset({"pp_size", "dp_size"})
"""Sizes that can only be 1."""
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
            for path, value in job_values({name: json_or_text(text)}, source=source).items():
                yield f"{section}.{path}", Setting(value, source)
        elif section == "engine" and name == "extra":
            extra = json_or_text(text)
            if not isinstance(extra, dict):
                raise ConfigError(f"{variable}={text!r}: a JSON object of SGLang arguments is needed")
            for argument, value in extra.items():
                yield f"engine.extra.{argument}", Setting(value, source)
        elif name not in known_names(section):
            known = [f"ROLLOUTMQ_{section}_{other}".upper() for other in known_names(section)]
            raise ConfigError(f"{variable}: no such setting{nearest(variable, known)}")
        else:
            yield (
                f"{section}.{name}",
                Setting(
                    text if takes_text(MODELS[section].model_fields[name].annotation) else json_or_text(text), source
                ),
            )


def job_values(given: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The settings below a job section of ours; sampling parameters may be in any dialect.

    Raises InvalidField, ConfigError.
    """
    plain = {name: given[name] for name in given if name in PLAIN_JOB}
    found = collect({name: value for name, value in given.items() if name not in plain})
    for error in found.errors.values():
        raise ConfigError(f"{source}: {error}")
    return plain | {path: value for path, (value, _) in found.fields.items()}


@dataclass(frozen=True, slots=True)
class WorkerFlag:
    """A flag of `rolloutmq worker`, and the names of the settings that it sets."""

    flag: Flag
    settings: tuple[str, ...]


@cache
def worker_flags() -> Mapping[str, WorkerFlag]:
    """The flags of `rolloutmq worker` by parameter name: one for every field of WorkerConfig and SGLangConfig.

    A field that both models have is one flag, which sets both.
    """
    found: dict[str, WorkerFlag] = {}
    for section in ("worker", "engine"):
        for flag in flags_of(MODELS[section]):
            if flag.field in WITHOUT_FLAG:
                continue
            name = FLAG_OF.get(flag.field, flag.name)
            others = found[name].settings if name in found else ()
            shown = found[name].flag if name in found else replace(flag, name=name)
            found[name] = WorkerFlag(shown, (*others, f"{section}.{flag.field}"))
    return found


def from_flags(context: Any) -> Iterator[tuple[str, Setting]]:
    """(name, setting) for the flags of `rolloutmq worker` that somebody typed; defaults and environment say nothing.

    context: the command's click or typer context. Raises ConfigError for a NAME=VALUE without a value.
    """
    flags = worker_flags()
    for parameter, value in context.params.items():
        source = context.get_parameter_source(parameter)
        if parameter not in flags or source is None or source.name not in {"COMMANDLINE", "PROMPT"} or value is None:
            continue
        told = f"flag --{parameter.replace('_', '-')}"
        given = flags[parameter].flag.value(value)
        for name in flags[parameter].settings:
            if name == "engine.extra":
                for argument, item in given.items():
                    yield f"engine.extra.{argument}", Setting(item, told)
            elif name == "engine.logit_processors":
                yield name, Setting({own: str(item) for own, item in given.items()}, told)
            else:
                yield name, Setting(given, told)


def apply(settings: Settings, found: Iterator[tuple[str, Setting]]) -> None:
    """Put settings on top of those that are there."""
    for name, setting in found:
        settings.put(name, setting.value, setting.source)
