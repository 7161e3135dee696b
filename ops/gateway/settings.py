"""How a gateway is started."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Settings:
    """redis, pool: the pool. name: what clients call the model; "" for what the workers call it. tokenizer: its path or
    name, None for the model's own if it is on this host. keys: the file of tenants and their keys, see Tenants.
    deadline_s: of requests that name none, in seconds.
    """

    redis: str
    pool: str = "default"
    name: str = ""
    tokenizer: str | None = None
    keys: Path | None = None
    deadline_s: float = 3600.0
