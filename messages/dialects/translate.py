"""Translates sampling parameters in the names of any engine or trainer into fields of a GenerateJob.

    job = GenerateJob.build(token_ids=ids, **job_fields({"max_tokens": 256, "top_k": 0, "logprobs": 5, "seed": 7}))

Only given names are set. A name that is absent or None keeps this package's default, which can differ from the other
engine's: by default vLLM generates 16 tokens, and this package 128. Two names for one field must agree. `names.py` has
the rule for every name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import ValidationError

from ..errors import InvalidField
from ..model import GenerateJob, LogitProcessor, LogprobOptions, SamplingParams, as_invalid_field
from ..nearest import nearest
from .names import DIALECTS, NESTED, READ_BY, RULES, SIGNS, Dialect, Rule

__all__ = ["Dialect", "Fate", "Translated", "job_fields", "sampling_from"]
Verdict = Literal["became", "ignored", "refused"]
PROCESSORS = {"only_tokens": "action_mask", "no_tokens": "disallowed_tokens"}
"""What readers say about token ids -> the logit processor that does it."""


@dataclass(frozen=True, slots=True)
class Fate:
    """The verdict on one given name. what: the fields and values it became, or why it was ignored or refused."""

    key: str
    value: Any
    verdict: Verdict
    what: str


@dataclass(frozen=True, slots=True)
class Translated:
    """sampling: the sampling parameters. job: the given fields of a GenerateJob, `sampling` among them.
    fates: one for every given name, in the given order.
    """

    sampling: SamplingParams
    job: Mapping[str, Any]
    fates: tuple[Fate, ...]

    @property
    def ignored(self) -> dict[str, str]:
        """Ignored name -> why nothing depends on it here. Names with the value None are left out."""
        return {fate.key: fate.what for fate in self.fates if fate.verdict == "ignored" and fate.value is not None}


def job_fields(params: Mapping[str, Any], dialect: Dialect = "auto") -> dict[str, Any]:
    """Sampling parameters of any dialect as keyword arguments of GenerateJob: sampling, n, seed, logprobs, ...

    Raises InvalidField, which names the parameter, its value and what is allowed: for an unknown name (with the nearest
    known ones), a parameter that cannot be honoured (with the reason), two that contradict each other, and a value out
    of range.
    """
    return dict(sampling_from(params, dialect).job)


def sampling_from(params: Mapping[str, Any], dialect: Dialect = "auto") -> Translated:
    """Sampling parameters of any dialect, and the verdict on every name. Raises as `job_fields` does.

    dialect: the names of all dialects are always known. The dialect decides the meaning of a value where they differ:
        `logprobs=1` asks for the sampled token's in SkyRL and VERL, and also for the most likely one's in vLLM. "auto"
        takes the dialect from the names.
    """
    found = collect(params, dialect)
    for error in found.errors.values():
        raise error
    return Translated(found.sampling(), found.job(), tuple(found.fates))


@dataclass(slots=True)
class Collected:
    """The names read so far. fields: field -> its value and the name that set it. errors: name -> error.

    section: what the fields begin with in fates.
    """

    section: str = ""
    fields: dict[str, tuple[Any, str]] = field(default_factory=dict)
    fates: list[Fate] = field(default_factory=list)
    errors: dict[str, InvalidField] = field(default_factory=dict)

    def take(self, key: str, value: Any, rule: Rule | None, name: str) -> None:
        """Read one name."""
        try:
            fate = self._read(key, value, rule, name)
        except InvalidField as error:
            self.errors[key] = error
            fate = Fate(key, value, "refused", error.allowed)
        self.fates.append(fate)

    def _read(self, key: str, value: Any, rule: Rule | None, name: str) -> Fate:
        if rule is None:
            if name in NESTED:
                raise InvalidField(key, value, "a mapping of sampling parameters")
            known = nearest(name, (*RULES, *NESTED))
            raise InvalidField(key, value, f"no sampling parameter of that name is known in any dialect{known}")
        if value is None:
            return Fate(key, value, "ignored", "says nothing: the default holds")
        if rule.refuse:
            if any(type(value) is type(quiet) and value == quiet for quiet in rule.unless):
                return Fate(key, value, "ignored", "says nothing: it is the default")
            raise InvalidField(key, value, rule.refuse)
        if rule.read is None:
            return Fate(key, value, "ignored", rule.why)
        try:
            told = rule.read(value)
        except ValueError as error:
            raise InvalidField(key, value, str(error)) from None
        except TypeError:
            raise InvalidField(key, value, "a value of another kind") from None
        for path, item in told.items():
            if path in self.fields and self.fields[path][0] != item:
                other, source = self.fields[path]
                raise InvalidField(key, value, f"{source} says {path}={other!r} already: one of them, or both alike")
        for path, item in told.items():
            self.fields.setdefault(path, (item, key))
        what = _shown(told, self.section) or "says nothing: it is the default"
        return Fate(key, value, "became" if told else "ignored", what)

    def settle(self) -> None:
        """Finish after the last name: greedy sampling, one count of most likely tokens, values in range."""
        if "greedy" in self.fields:
            _, key = self.fields.pop("greedy")
            told, other = self.fields.get("sampling.temperature", (0.0, ""))
            self.fields["sampling.temperature"] = (0.0, key)
            if told != 0:
                why = f"{key}=False is greedy, whatever the temperature"
                self.fates = [Fate(f.key, f.value, "ignored", why) if f.key == other else f for f in self.fates]
        if "prompt_top" in self.fields:
            count, key = self.fields.pop("prompt_top")
            beside = self.fields.get("logprobs.top", (0, key))
            if isinstance(beside[0], int) and beside[0] < count:  # what is no count is refused below
                self.fields["logprobs.top"] = (count, key)
        for path, processor in PROCESSORS.items():
            if path in self.fields:
                ids, key = self.fields.pop(path)
                given = self.fields.get("logit_processors", ((), key))[0]
                try:
                    made = LogitProcessor(name=processor, params={"token_ids": list(ids)})
                except ValidationError as error:
                    self._refuse(key, InvalidField(key, ids, as_invalid_field(error).allowed))
                    continue
                self.fields["logit_processors"] = ((*given, made), key)
        if self.errors:
            return
        job = GenerateJob.model_fields
        try:
            SamplingParams(**self._under("sampling."))
            LogprobOptions(**self._under("logprobs."))
            GenerateJob(token_ids=[0], **{path: value for path, (value, _) in self.fields.items() if path in job})
        except ValidationError as error:
            wrong = as_invalid_field(error)
            self._blame(wrong)

    def _blame(self, wrong: InvalidField) -> None:
        """Record the error for the name that was given, not for the field that it became."""
        first = wrong.field.split(".")[0]
        for path in (f"sampling.{first}", f"logprobs.{first}", first):
            if path in self.fields:
                value, key = self.fields[path]
                shown = key if key.rsplit(".", 1)[-1] == first else f"{key} ({path})"
                self._refuse(key, InvalidField(shown, value, wrong.allowed))
                return
        self.errors[""] = wrong  # a contradiction between two of them

    def _refuse(self, key: str, error: InvalidField) -> None:
        self.errors[key] = error
        self.fates = [
            Fate(key, fate.value, "refused", error.allowed) if fate.key == key else fate for fate in self.fates
        ]

    def _under(self, prefix: str) -> dict[str, Any]:
        return {path.removeprefix(prefix): item for path, (item, _) in self.fields.items() if path.startswith(prefix)}

    def sampling(self) -> SamplingParams:
        """The sampling parameters. Raises pydantic's ValidationError if `errors` has one about them."""
        return SamplingParams(**self._under("sampling."))

    def job(self) -> dict[str, Any]:
        """The given fields of a GenerateJob."""
        said: dict[str, Any] = {path: item for path, (item, _) in self.fields.items() if "." not in path}
        if self._under("sampling."):
            said["sampling"] = self.sampling()
        if options := self._under("logprobs."):
            said["logprobs"] = LogprobOptions(**options)
        return said


def collect(params: Mapping[str, Any], dialect: Dialect = "auto", prefix: str = "", section: str = "") -> Collected:
    """Read all names, errors too. Keys begin with `prefix` in fates and errors, fields with `section` in fates."""
    if dialect not in DIALECTS:
        raise InvalidField("dialect", dialect, f"one of {', '.join(DIALECTS)}{nearest(str(dialect), DIALECTS)}")
    if not isinstance(params, Mapping):
        raise InvalidField(prefix.rstrip(".") or "params", params, "a mapping of sampling parameters")
    rules = RULES | READ_BY.get(_dialect_of(params) if dialect == "auto" else dialect, {})
    found = Collected(section)
    for key, name, value in _names(params, prefix):
        found.take(key, value, rules.get(name), name)
    found.settle()
    return found


def _names(params: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str, Any]]:
    for name, value in params.items():
        if name in NESTED and isinstance(value, SamplingParams):
            yield from _names(value.model_dump(exclude_unset=True), f"{prefix}{name}.")
        elif name in NESTED and isinstance(value, Mapping):
            yield from _names(value, f"{prefix}{name}.")
        elif name not in NESTED or value is not None:
            yield f"{prefix}{name}", str(name), value


def _dialect_of(params: Mapping[str, Any]) -> Dialect:
    names = {part for key, _, _ in _names(params, "") for part in key.split(".")}
    return next((dialect for dialect, signs in SIGNS.items() if signs & names), "auto")


def _shown(told: Mapping[str, Any], section: str) -> str:
    plain = {
        "greedy": ("sampling.temperature", 0),
        "prompt_top": ("logprobs.top", told.get("prompt_top")),
        **{path: ("logit_processors", processor) for path, processor in PROCESSORS.items()},
    }
    pairs = (plain.get(path, (path, item)) for path, item in told.items())
    return ", ".join(f"{section}{path}={item!r}" for path, item in pairs)
