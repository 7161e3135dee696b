"""How a gateway is started."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Settings:
    """redis, pools: the pools that all tenants share. name: what clients call the model; "" for what the workers call
    it. tokenizer: its path or name, None for the model's own if it is on this host. Both are of the first pool.
    keys: the file of tenants and their keys, see Tenants. tenant: who sends no key is this one of them.
    defaults: fields of OpenAI's bodies that leave them out. deadline_s: of requests that name none, in seconds.
    weights_from: the folder below which tenants' weights are; None takes none. snapshots: where their versions are
    saved, in a folder for each pool. receiver_device: where broadcast tensors arrive.
    """

    redis: str
    pools: Sequence[str] = ("default",)
    name: str = ""
    tokenizer: str | None = None
    keys: Path | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    deadline_s: float = 3600.0
    tenant: str | None = None
    weights_from: Path | None = None
    snapshots: Path | None = None
    receiver_device: str = "cpu"
