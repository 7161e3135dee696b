"""Configurations as guides of trainers show them, and what is to become of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import yaml

from rolloutmq import GenerateJob
from rolloutmq.messages.errors import ConfigError
from rolloutmq.ops.config import Settings, explain, load_settings

NOTHING: Mapping[str, Any] = MappingProxyType({})


class Example(NamedTuple):
    """text: YAML, or overrides as a command line has them. gives: every setting that it becomes. refused: its keys that
    cannot be honoured, with a part of the reason. beside: what the guide's reader has around the example."""

    text: str
    gives: Mapping[str, Any] = NOTHING
    refused: Mapping[str, str] = NOTHING
    beside: str = ""


def written(tmp_path: Path, example: Example) -> Path:
    """The example as a file; overrides are merged as Hydra merges them."""
    document: dict[str, Any] = {} if "=" in example.text else yaml.safe_load(example.text)
    overrides = example.text.split() if "=" in example.text else []
    for override in (*overrides, *example.beside.split()):
        name, _, value = override.partition("=")
        *parts, last = name.split(".")
        inside = document
        for part in parts:
            inside = inside.setdefault(part, {})
        inside[last] = yaml.safe_load(value)
    path = tmp_path / "example.yaml"
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    return path


def built(settings: Settings) -> None:
    """Everything can be made of it."""
    settings.worker()
    settings.engine()
    for section in ("job", "eval"):
        GenerateJob.build(token_ids=[1], **settings.job(section))
    settings.publisher()
    settings.group_rules()
    settings.episode_limits()


def check(example: Example, tmp_path: Path) -> None:
    """It becomes what it says, and no key but the refused ones keeps it from loading."""
    path = written(tmp_path, example)
    found = explain(path, {})
    refused = {fate.key: fate.what for fate in found.refused}
    assert refused.keys() == example.refused.keys()
    assert all(reason in refused[key] for key, reason in example.refused.items())
    assert {name: it.value for name, it in found.settings.said.items()} == example.gives
    assert all(fate.what for fate in found.fates)
    if refused:
        with pytest.raises(ConfigError, match=next(iter(refused)).rpartition(".")[2]):
            load_settings(path, environment={})
        document = yaml.safe_load(path.read_text())
        for key in refused:
            *parts, last = key.split(".")
            inside = document
            for part in parts:
                inside = inside[part]
            del inside[last]
        path.write_text(yaml.safe_dump(document))
    built(load_settings(path, environment={"ROLLOUTMQ_ENGINE_MODEL": "m"}))
