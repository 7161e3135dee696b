"""Settings from one file (ours, SkyRL's or VERL's), the environment and flags. Later sources win."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...messages.dialects import Fate, Rule
from ...messages.errors import ConfigError
from ...messages.nearest import nearest
from . import skyrl, verl
from .document import read_document
from .interpolation import CannotResolve, Resolver
from .settings import PLAIN_JOB, SECTIONS, Settings, hidden
from .sources import apply, from_environment, from_flags
from .translate import Block, Explained

OWN = "rolloutmq"
"""Top-level key of our own sections in somebody else's file."""


def load_settings(
    file: Path | None = None, *, environment: Mapping[str, str] | None = None, context: Any = None
) -> Settings:
    """The settings of a worker or a trainer.

    file: YAML, TOML or JSON; see docs/configuration.md. environment: by default this process'. context: of a click or
    typer command whose flags are those of `rolloutmq worker`.

    Raises ConfigError if the file has keys that are unknown or cannot be honoured; the error names the file and all of
    these keys. Raises ConfigError and InvalidField for environment and flags. Values are checked when `worker()`,
    `engine()`, ... build something from them.
    """
    explained = explain(file, environment) if file is not None else None
    if explained is not None and explained.refused:
        told = "; ".join(f"{fate.key}={hidden(fate.key, fate.value)!r}: {fate.what}" for fate in explained.refused)
        raise ConfigError(f"{file}: {told}")
    settings = explained.settings if explained is not None else Settings()
    apply(settings, from_environment(os.environ if environment is None else environment))
    if context is not None:
        apply(settings, from_flags(context))
    return settings


def explain(file: Path, environment: Mapping[str, str] | None = None) -> Explained:
    """The fate of every key of a file. Raises ConfigError if it cannot be read, or its kind cannot be told."""
    document = read_document(file)
    block = find_block(document, file)
    explained = Explained(str(file), Resolver(document, environment), OWN, block)
    ours = document
    if block is not None:
        module = skyrl if block.kind == "skyrl" else verl
        explained.translate(block.values, module.table(_resolved(block, explained.resolver)), block.path)
        _around(explained, document, block, module.BESIDE)
        ours = document.get(OWN) or {}
    elif OWN in document:
        ours = document[OWN]
    _own(explained, ours, (OWN,) if ours is not document else ())
    _check(explained)
    return explained


def _resolved(block: Block, resolver: Resolver) -> dict[str, Any]:
    """The block's values for rules that depend on several keys; those that cannot be resolved as they are."""
    found = dict(block.values)
    for key, value in found.items():
        with suppress(CannotResolve):  # its own fate says so
            found[key] = resolver.value(value, (*block.path, key))
    return found


def find_block(document: Mapping[str, Any], file: Path) -> Block | None:
    """SkyRL's or VERL's settings, wherever they are in the file; None for a file of ours.

    Raises ConfigError if there are several blocks, or the file is of no known kind.
    """
    found = list(_blocks(document, ()))
    if any(block.path == ("actor_rollout_ref", "rollout") for block in found):
        # VERL's asynchronous trainers say at the top how many nodes roll out, and here what engines are like.
        found = [block for block in found if block.path != ("rollout",)]
    exact = [block for block in found if block.path in {("generator",), ("actor_rollout_ref", "rollout"), ("rollout",)}]
    if len(exact) == 1:
        return exact[0]
    if len(found) > 1:
        places = ", ".join(".".join(block.path) for block in found)
        raise ConfigError(f"{file}: settings for engines at {places}: one of them is needed")
    if found:
        return found[0]
    if document.keys() <= {*SECTIONS, OWN}:
        return None
    for kind, table in (("skyrl", skyrl.table(document)), ("verl", verl.table(document))):
        telling = [key for key in document.keys() & table.keys() if _tells(table[key])]
        if telling and 2 * len(document.keys() & table.keys()) > len(document):
            return Block(kind, (), document)
    raise ConfigError(f"{file}: {_strange(document)}")


def _strange(document: Mapping[str, Any]) -> str:
    """What to say about a file without settings, or with a key beside them that is unknown."""
    known = (*SECTIONS, OWN, "generator", "actor_rollout_ref", "rollout")
    strange = next(key for key in document if key not in {*SECTIONS, OWN})
    near = nearest(strange, known)
    if "defaults" in document:
        return "Hydra composes this file, and it holds no settings of engines: write out what it composed (--cfg job)"
    if near or document.keys() & set(known):
        return f"{strange!r}: no such key{near}; known are {', '.join(known)}"
    return (
        f"no settings of workers, engines or jobs are here: it begins with {strange!r}; a section "
        f"({', '.join(SECTIONS)}), SkyRL's generator: or VERL's actor_rollout_ref.rollout is needed"
    )


def _tells(rule: Any) -> bool:
    """Whether a setting may depend on a key with this rule."""
    return not isinstance(rule, Rule) or rule.read is not None or bool(rule.refuse)


def _blocks(values: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[Block]:
    for key, inside in values.items():
        if not isinstance(inside, Mapping):
            continue
        here = (*path, key)
        if key == "generator" and inside.keys() & skyrl.table(inside).keys():
            yield Block("skyrl", here, inside)
        elif key == "rollout" and inside.keys() & verl.table(inside).keys():
            yield Block("verl", here, inside)
        else:
            yield from _blocks(inside, here)


def _around(
    explained: Explained, document: Mapping[str, Any], block: Block, beside: Mapping[tuple[str, ...], Rule]
) -> None:
    """The fate of what stands beside the block: the keys that engines need, and the rest by its top key."""
    for path, rule in beside.items():
        values: Any = document
        for part in path[:-1]:
            values = values.get(part) if isinstance(values, Mapping) else None
        if isinstance(values, Mapping) and path[-1] in values:
            explained.key(path, values[path[-1]], rule)
    values = document
    for depth, part in enumerate(block.path):
        for key, value in values.items():
            here = (*block.path[:depth], key)
            if key != part and here not in beside and here != (OWN,):
                shown = f"{type(value).__name__} of {len(value)}" if isinstance(value, Mapping | list) else value
                used = any(path[: depth + 1] == here for path in beside)
                why = "for the trainer, but for what is listed above" if used else "for the trainer"
                if key == "defaults" and depth == 0:
                    why = "Hydra composes files: write out what it composed (--cfg job --resolve) to have all of it"
                explained.ignore(here, shown, why)
        values = values[part]


def _own(explained: Explained, values: Any, path: tuple[str, ...]) -> None:
    """Our own sections."""
    if values is None:
        return
    if not isinstance(values, Mapping):
        explained.refuse(path, values, f"a mapping of {', '.join(SECTIONS)} is needed")
        return
    for section, inside in values.items():
        here = (*path, section)
        if section not in SECTIONS:
            explained.refuse(here, inside, f"no such section{nearest(section, SECTIONS)}; {', '.join(SECTIONS)}")
        elif not isinstance(inside, Mapping):
            explained.refuse(here, inside, "a mapping is needed")
        elif section in {"job", "eval"}:
            _own_job(explained, section, inside, here)
        else:
            _own_fields(explained, section, inside, here)


def _own_fields(explained: Explained, section: str, values: Mapping[str, Any], path: tuple[str, ...]) -> None:
    for key, value in values.items():
        if section == "engine" and key == "extra" and isinstance(value, Mapping):
            for name, item in value.items():
                explained.put((*path, key, name), item, f"engine.extra.{name}")
        else:
            explained.put((*path, key), value, f"{section}.{key}")


def _own_job(explained: Explained, section: str, values: Mapping[str, Any], path: tuple[str, ...]) -> None:
    _own_fields(explained, section, {name: value for name, value in values.items() if name in PLAIN_JOB}, path)
    explained.sampling(path, {name: values[name] for name in values if name not in PLAIN_JOB}, section, "auto")


def _check(explained: Explained) -> None:
    """Refuse values that no worker and no job could have, at the key that gave them."""
    for name, problem in explained.settings.problems():
        setting = explained.settings.said.get(name)
        key = setting.source.removeprefix(f"{explained.file}: ") if setting else name
        value = setting.value if setting else None
        why = problem.removesuffix(f" ({setting.source})") if setting else problem
        for index, fate in enumerate(explained.fates):
            if fate.key == key:
                explained.fates[index] = Fate(key, fate.value, "refused", why)
                break
        else:
            explained.fates.append(Fate(key, value, "refused", why))
