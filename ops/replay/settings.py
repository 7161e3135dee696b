"""What a replay is given beside the samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .verdict import Limits


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of all kinds of replay. Each kind takes what it needs.

    model: folder or hub name of the base model, whose weights are version 0; None for the one that the samples name.
    snapshots: folder of recorded versions, as a SnapshotStore writes it. weights: a checkpoint to use in place of every
    recorded version. adapters: folder with a folder NAME@VERSION for each version of a LoRA adapter, as PEFT saves it.
    engine: settings of the engine, by the names of SGLangConfig's fields.
    """

    limits: Limits = field(default_factory=Limits)
    model: str | None = None
    snapshots: Path | None = None
    weights: Path | None = None
    adapters: Path | None = None
    engine: Mapping[str, Any] = field(default_factory=dict)
