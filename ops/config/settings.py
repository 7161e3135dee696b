"""Settings by name, each with its source, and the objects built from them.

Names: worker.* (WorkerConfig), engine.* (SGLangConfig; engine.extra.* are SGLang's own arguments), job.* and eval.*
(what a trainer submits: fields of GenerateJob, sampling.* and logprobs.* below them), publisher.* (WeightPublisher),
group.* (GroupRules), episodes.* (EpisodeLimits), tools.* (a file of tools, and ToolLimits).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeVar, get_args, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from ...messages.errors import ConfigError, InvalidField
from ...messages.model import GenerateJob, LogprobOptions, SamplingParams, as_invalid_field
from ...messages.nearest import nearest
from ...messages.redis import DEFAULT_URL, parse_shards, redacted
from ...producer import EpisodeLimits, GroupRules
from ...producer.data import ToolLimits, ToolRegistry
from ...sync.transfer import SyncSettings
from ...worker.config import WorkerConfig
from ...worker.sglang import OWNED_ARGUMENTS, SGLangConfig, check_extra, check_parallelism

Model = TypeVar("Model", bound=BaseModel)
Made = TypeVar("Made", GroupRules, EpisodeLimits, ToolLimits)
SECTIONS = ("worker", "engine", "job", "eval", "publisher", "group", "episodes", "tools")


def _model_of(made: type[Any], **others: Any) -> type[BaseModel]:
    """A model of a dataclass' fields, but for those that are code. others: more fields, or other types of these."""
    hints = get_type_hints(made)
    plain = {it.name: (hints[it.name], it.default) for it in fields(made) if "Callable" not in str(hints[it.name])}
    return create_model(made.__name__, __config__=ConfigDict(extra="forbid", strict=True), **(plain | others))


MODELS: Mapping[str, type[BaseModel]] = {
    "worker": WorkerConfig,
    "engine": SGLangConfig,
    "publisher": SyncSettings,
    "group": _model_of(GroupRules),
    "episodes": _model_of(EpisodeLimits, on_full=(Literal["stop", "truncate"], "stop")),
    "tools": _model_of(ToolLimits, path=(str | None, None)),
}
"""Sections whose settings are the fields of a model, with their defaults and help."""
SETTING_OF: Mapping[str, str] = {
    "mem_fraction_static": "mem_fraction",
    "max_running_requests": "max_running",
    "disable_cuda_graph": "cuda_graph",
    "disable_prefill_cuda_graph": "prefill_cuda_graph",
    "disable_overlap_schedule": "overlap_schedule",
    "enable_memory_saver": "memory_saver",
}
"""SGLang's arguments whose setting in engine.* has another name. All others have the same name."""
PLAIN_JOB = (
    "priority",
    "engine_priority",
    "deadline_s",
    "min_version",
    "exact_version",
    "max_staleness",
    "min_adapter_version",
    "tool_parser",
)
"""Fields of a job that are no sampling parameters and may be a default for many jobs."""
OTHER_JOB = ("n", "seed", "stream", "lora", "hidden_states", "routed_experts", "logit_processors")
"""Fields of a job that dictionaries of sampling parameters may hold, too."""


@dataclass(frozen=True, slots=True)
class Setting:
    """source: for people, such as "flag --tp" or "pool.yaml: generator.backend"."""

    value: Any
    source: str


@dataclass(slots=True)
class Settings:
    """The settings that somebody gave, by name. A later `put` wins over an earlier one."""

    said: dict[str, Setting] = field(default_factory=dict)

    def put(self, name: str, value: Any, source: str) -> None:
        """Set one. Raises ConfigError for an unknown name."""
        check_name(name, source)
        self.said[name] = Setting(value, source)

    def worker(self) -> WorkerConfig:
        """Raises InvalidField, ConfigError."""
        given = self._section("worker")
        given.setdefault("redis_url", DEFAULT_URL)
        parse_shards(given["redis_url"]) if isinstance(given["redis_url"], str) else None
        return self._model(WorkerConfig, "worker", given)

    def engine(self) -> SGLangConfig:
        """Raises InvalidField; ConfigError if no model is named, or SGLang's argument is not to be set."""
        given = self._section("engine")
        if "model" not in given:
            raise ConfigError(
                "engine.model: a directory or hub name is needed (--model, ROLLOUTMQ_ENGINE_MODEL or the file)"
            )
        if "max_running" not in given:
            given["max_running"] = self.worker().max_running
        self.check_parallelism()
        self._check_extra(given.get("extra", {}))
        return self._model(SGLangConfig, "engine", given)

    def _check_extra(self, extra: Mapping[str, Any]) -> None:
        """Raises as `check_extra` does; InvalidField, too, if an argument and its setting are given: it would win."""
        try:
            check_extra(extra)
        except InvalidField as error:
            raise self._with_source(error, "engine") from None
        for name, value in extra.items():
            setting = self.said.get(f"engine.{SETTING_OF.get(name, name)}")
            if setting is not None and f"engine.extra.{name}" in self.said:
                said = f"engine.{SETTING_OF.get(name, name)}={setting.value!r}"
                raise InvalidField(f"extra.{name}", value, f"one of the two: {setting.source} says {said}")

    def check_parallelism(self) -> None:
        """Raises InvalidField for sizes that are not supported."""
        found = {}
        for short in ("tp", "pp", "dp", "ep"):
            setting = self.said.get(f"engine.{short}_size") or self.said.get(f"engine.extra.{short}_size")
            if setting is not None:
                found[short] = setting.value
        try:
            check_parallelism(**found)
        except InvalidField as error:
            raise self._with_source(error, "engine", error.field) from None

    def job(self, section: str = "job") -> dict[str, Any]:
        """Keyword arguments for GenerateJob: the settings under job.* (or eval.*). Raises InvalidField."""
        given = self._section(section)
        models: dict[str, type[BaseModel]] = {"sampling": SamplingParams, "logprobs": LogprobOptions}
        for name, model in models.items():
            if name in given:
                given[name] = self._model(model, f"{section}.{name}", given[name])
        try:
            GenerateJob(token_ids=[0], **given)
        except ValidationError as error:
            raise self._with_source(as_invalid_field(error), section) from None
        return given

    def publisher(self) -> dict[str, Any]:
        """Keyword arguments for WeightPublisher, for the same pool as the worker's."""
        worker = self.worker()
        return {"redis_url": worker.redis_url, "pool": worker.pool, **self._section("publisher")}

    def group_rules(self, **code: Any) -> GroupRules:
        """The rules of a feed. code: more of its fields, such as score. Raises InvalidField."""
        return self._made(GroupRules, "group", code)

    def episode_limits(self, **code: Any) -> EpisodeLimits:
        """Limits for `RolloutClient.episodes`. code: more of its fields, such as on_full. Raises InvalidField."""
        return self._made(EpisodeLimits, "episodes", code)

    def tool_limits(self) -> ToolLimits:
        """Limits of a turn's calls. Raises InvalidField."""
        return self._made(ToolLimits, "tools")

    def tools(self) -> ToolRegistry:
        """The tools of the file at tools.path, or none; see `ToolRegistry.load`. Raises InvalidField, ConfigError."""
        limits, path = self.tool_limits(), self.said.get("tools.path")
        if path is None or path.value is None:
            return ToolRegistry(limits=limits)
        return ToolRegistry.load(path.value, limits)

    def _made(self, made: type[Made], section: str, code: Mapping[str, Any] | None = None) -> Made:
        checked = self._model(MODELS[section], section, self._section(section))
        try:
            return made(**{**checked.model_dump(exclude_unset=True, exclude={"path"}), **(code or {})})
        except InvalidField as error:
            raise self._with_source(error, section) from None

    def problems(self) -> Iterator[tuple[str, str]]:
        """(name of a setting or section, what is wrong with it), for each error that building all of them raises."""
        left = Settings({"engine.model": Setting("any", "nobody"), **self.said})
        builds: dict[str, Callable[[], object]] = {
            "worker": left.worker,
            "engine": left.engine,
            "job": left.job,
            "eval": lambda: left.job("eval"),
            "publisher": lambda: left._model(SyncSettings, "publisher", left._section("publisher")),
            "group": left.group_rules,
            "episodes": left.episode_limits,
            "tools": left.tool_limits,
        }
        for section, build in builds.items():
            while (problem := left._problem(section, build)) is not None:
                yield problem
                if left.said.pop(problem[0], None) is None:  # about several
                    break

    def _problem(self, section: str, build: Callable[[], object]) -> tuple[str, str] | None:
        try:
            build()
        except InvalidField as error:
            return self._name(section, error.field), error.allowed
        except ConfigError as error:
            return "worker.redis_url" if section == "worker" else section, str(error)
        return None

    def shown(self) -> list[tuple[str, Any, str]]:
        """(name, value, source) of all settings, defaults included and passwords left out."""
        defaults: dict[str, Any] = {"worker.redis_url": DEFAULT_URL}
        for section, model in MODELS.items():
            for name, info in model.model_fields.items():
                if not info.is_required():
                    defaults[f"{section}.{name}"] = info.get_default(call_default_factory=True)
        del defaults["engine.extra"]
        defaults["engine.max_running"] = self.worker().max_running
        rows = {name: (value, "default") for name, value in defaults.items()}
        rows |= {name: (setting.value, setting.source) for name, setting in self.said.items()}
        order = {section: index for index, section in enumerate(SECTIONS)}
        names = sorted(rows, key=lambda name: order[name.partition(".")[0]])
        return [(name, hidden(name, rows[name][0]), rows[name][1]) for name in names]

    def _section(self, section: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        overrides: dict[str, Any] = {}
        for name, setting in self.said.items():
            first, *rest = name.split(".", 2 if section == "engine" else -1)
            if first != section:
                continue
            if rest[0] == "override":
                overrides[rest[1]] = setting.value
                continue
            inside = found
            for part in rest[:-1]:
                inside = inside.setdefault(part, {})
            inside[rest[-1]] = setting.value
        if overrides:
            extra = found.setdefault("extra", {})
            extra["json_model_override_args"] = _merged(extra.get("json_model_override_args"), overrides)
        return found

    def _model(self, model: type[Model], section: str, given: Mapping[str, Any]) -> Model:
        try:
            return model(**given)
        except ValidationError as error:
            raise self._with_source(as_invalid_field(error), section) from None

    def _with_source(self, error: InvalidField, section: str, name: str = "") -> InvalidField:
        setting = self.said.get(self._name(section, name or error.field))
        if setting is None or setting.source.startswith("flag "):
            return error
        return InvalidField(error.field, error.value, f"{error.allowed} ({setting.source})")

    def _name(self, section: str, field_name: str) -> str:
        """The setting that an error about a field of `section` is about."""
        first = field_name.split(".", maxsplit=1)[0]
        candidates = [f"{section}.{field_name}", f"{section}.{first}", f"{section}.extra.{first}"]
        candidates += [f"{section}.{inner}.{first}" for inner in ("sampling", "logprobs")]
        return next((name for name in candidates if name in self.said), f"{section}.{field_name}")


def check_name(name: str, source: str) -> None:
    """Raises ConfigError for an unknown setting; the error names source, name and the nearest known names."""
    section, _, rest = name.partition(".")
    if section not in SECTIONS or not rest:
        near, sections = nearest(section, SECTIONS), ", ".join(SECTIONS)
        raise ConfigError(f"{source}: {name!r}: no such setting{near}; they begin with {sections}")
    first, _, below = rest.partition(".")
    if section == "engine" and first in {"extra", "override"} and below:
        if below in OWNED_ARGUMENTS:
            raise ConfigError(f"{source}: {name!r}: RolloutMQ sets this argument of SGLang itself")
        return
    known = known_names(section)
    if rest not in known:
        near = nearest(name, [f"{section}.{other}" for other in known])
        raise ConfigError(f"{source}: {name!r}: no such setting{near}")


def known_names(section: str) -> list[str]:
    """Names below a section."""
    if section in MODELS:
        return list(MODELS[section].model_fields)
    plain = [*PLAIN_JOB, *OTHER_JOB]
    plain += [f"sampling.{name}" for name in SamplingParams.model_fields]
    return plain + [f"logprobs.{name}" for name in LogprobOptions.model_fields]


def worded(name: str, value: Any) -> Any:
    """`value`, or "on" or "off" for a boolean where the setting has these words: YAML takes them for booleans."""
    section, _, rest = name.partition(".")
    if not isinstance(value, bool) or section not in MODELS or rest not in MODELS[section].model_fields:
        return value
    word = "on" if value else "off"
    return word if word in get_args(MODELS[section].model_fields[rest].annotation) else value


def hidden(name: str, value: Any) -> Any:
    """`value` without a password."""
    return redacted(value) if name.endswith("redis_url") and isinstance(value, str) else value


def _merged(given: Any, overrides: Mapping[str, Any]) -> str:
    try:
        base = json.loads(given) if isinstance(given, str) else dict(given or {})
    except (ValueError, TypeError):
        raise ConfigError(f"engine.extra.json_model_override_args={given!r}: a JSON object is needed") from None
    try:
        return json.dumps(base | dict(overrides))
    except TypeError as error:
        raise ConfigError(f"changes to the model's configuration are JSON: {error}") from None
