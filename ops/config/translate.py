"""Translates a block of a foreign configuration key by key, by a table of rules, and records each key's fate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ...messages.dialects import Dialect, Fate, Rule, collect
from ...messages.errors import ConfigError
from ...messages.nearest import nearest
from .interpolation import MISSING, CannotResolve, Resolver
from .settings import Settings, hidden, worded


@dataclass(frozen=True, slots=True)
class Sampling:
    """A mapping of sampling parameters, for the jobs of training or of evaluation."""

    section: Literal["job", "eval"]
    dialect: Dialect


@dataclass(frozen=True, slots=True)
class Arguments:
    """A mapping of an engine's own arguments. `rules` read some; the others go to SGLang as they are, or are refused.

    refuse: why the others are refused; "" lets them through.
    """

    rules: Mapping[str, Rule]
    refuse: str = ""


Table = Mapping[str, "Rule | Sampling | Arguments | Table"]
"""A Rule reads a value, also a mapping as a whole. The others go through a mapping."""


@dataclass(frozen=True, slots=True)
class Block:
    """SkyRL's or VERL's settings in a file.

    kind: "skyrl" or "verl". path: of keys that lead to it; () if the file is nothing but its inside.
    """

    kind: str
    path: tuple[str, ...]
    values: Mapping[str, Any]


@dataclass(slots=True)
class Explained:
    """A file, key by key: the settings in it, and one of the fates for each key.

    file: its name. wins: keys that begin so win over others. block: where SkyRL's or VERL's settings were found; None
    in a file of ours.
    """

    file: str
    resolver: Resolver
    wins: str
    block: Block | None
    settings: Settings = field(default_factory=Settings)
    fates: list[Fate] = field(default_factory=list)

    @property
    def refused(self) -> list[Fate]:
        """The keys that ask for something that cannot be done."""
        return [fate for fate in self.fates if fate.verdict == "refused"]

    def translate(self, values: Mapping[str, Any], table: Table, path: tuple[str, ...]) -> None:
        """Go through the mapping at `path`."""
        for key, value in values.items():
            here = (*path, key)
            rule = table.get(key)
            match rule:
                case None:
                    self.refuse(here, value, f"no key of this name is known here{nearest(key, list(table))}")
                case Rule():
                    self.key(here, value, rule)
                case _:
                    self._inside(here, value, rule)

    def _inside(self, path: tuple[str, ...], value: Any, rule: Sampling | Arguments | Table) -> None:
        try:
            if isinstance(value, str):
                value = self.resolver.value(value, path)
        except CannotResolve as error:
            return self.refuse(path, value, str(error))
        if value is None:
            return self.ignore(path, value, "says nothing")
        if not isinstance(value, Mapping):
            return self.refuse(path, value, "a mapping is needed")
        match rule:
            case Sampling(section, dialect):
                self.sampling(path, value, section, dialect)
            case Arguments(rules, why):
                for name, item in value.items():
                    self.key((*path, name), item, rules.get(name) or _argument(name, why))
            case _:
                self.translate(value, rule, path)
        return None

    def key(self, path: tuple[str, ...], value: Any, rule: Rule) -> None:
        """Take one key. Interpolations in it are resolved only if a setting depends on the value."""
        if rule.read is None and not rule.refuse:
            return self.ignore(path, value, rule.why)
        try:
            value = self.resolver.value(value, path)
            told = _told(value, rule)
        except ValueError as error:
            return self.refuse(path, value, str(error))
        except TypeError:
            return self.refuse(path, value, "a value of another kind is needed")
        return self._became(path, value, told, rule.why)

    def put(self, path: tuple[str, ...], value: Any, name: str) -> None:
        """Take a key that has the name of one of our settings. null is a value like any other."""
        try:
            value = self.resolver.value(value, path)
        except ValueError as error:
            return self.refuse(path, value, str(error))
        return self._became(path, value, {name: value})

    def _became(self, path: tuple[str, ...], value: Any, told: Mapping[str, Any], why: str = "") -> None:
        if not told:
            return self.ignore(path, value, "says nothing" if value is None else why or "it is how it is here")
        told = {name: worded(name, item) for name, item in told.items()}
        for name, item in told.items():
            other = self.settings.said.get(name)
            if other is not None and other.value != item and not self._beats(path, name, other.source):
                return self.refuse(
                    path, value, f"{other.source} says {name}={other.value!r}: both alike, or one of them"
                )
        for name, item in told.items():
            source = f"{self.file}: {'.'.join(path)}"
            try:
                self.settings.put(name, item, source)
            except ConfigError as error:
                return self.refuse(path, value, str(error).removeprefix(f"{source}: "))
        what = ", ".join(f"{name}={hidden(name, item)!r}" for name, item in told.items())
        self.fates.append(Fate(".".join(path), value, "became", f"{what} ({why})" if why else what))
        return None

    def _beats(self, path: tuple[str, ...], name: str, source: str) -> bool:
        """Whether the key at `path` wins over `source`. The fate of the one that loses then says so."""
        loser = source.removeprefix(f"{self.file}: ")
        if not self.wins or path[0] != self.wins or loser.startswith(f"{self.wins}."):
            return False
        for index, fate in enumerate(self.fates):
            if fate.key == loser:
                what = f"{fate.what}; but {'.'.join(path)} says {name}"
                self.fates[index] = Fate(fate.key, fate.value, fate.verdict, what)
        return True

    def sampling(self, path: tuple[str, ...], values: Mapping[str, Any], section: str, dialect: Dialect) -> None:
        """Take the sampling parameters, in any dialect, of the mapping at `path`."""
        known: dict[str, Any] = {}
        for name, value in values.items():
            try:
                known[name] = self.resolver.value(value, (*path, name))
                if known[name] == MISSING:
                    raise CannotResolve("??? stands for a value that somebody has to give")
            except CannotResolve as error:
                self.refuse((*path, name), known.pop(name, value), str(error))
        prefix = "".join(f"{part}." for part in path)
        found = collect(known, dialect, prefix, f"{section}.")
        if "" in found.errors:  # a contradiction between several
            found.fates.append(Fate(prefix.rstrip("."), dict(known), "refused", found.errors[""].allowed))
        for fate in found.fates:
            told = {f"{section}.{name}": item for name, (item, key) in found.fields.items() if key == fate.key}
            if fate.verdict == "became" and told and not found.errors:
                self._became(tuple(fate.key.split(".")), fate.value, told)
            else:
                self.fates.append(fate)

    def ignore(self, path: tuple[str, ...], value: Any, why: str) -> None:
        """Record that no setting depends on the key."""
        self.fates.append(Fate(".".join(path), value, "ignored", why))

    def refuse(self, path: tuple[str, ...], value: Any, why: str) -> None:
        """Record that the key is unknown, or asks for something that cannot be done."""
        self.fates.append(Fate(".".join(path), value, "refused", why))


def _told(value: Any, rule: Rule) -> Mapping[str, Any]:
    """The settings that a value becomes. Raises ValueError saying why it is refused."""
    if value is None:
        return {}
    if value == MISSING:
        raise ValueError("??? stands for a value that somebody has to give")
    if rule.read is not None:
        return rule.read(value)
    if any(type(value) is type(quiet) and value == quiet for quiet in rule.unless):
        return {}
    raise ValueError(rule.refuse)


def _argument(name: str, refuse: str) -> Rule:
    return Rule(refuse=refuse) if refuse else Rule(lambda value: {f"engine.extra.{name}": value})
