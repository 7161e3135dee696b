"""The scenarios, by what goes wrong in them."""

from __future__ import annotations

from importlib import import_module

FILES = (
    "deaths",
    "shards",
    "crowds",
    "garbage",
    "network",
    "servers",
    "disks",
    "failover",
    "trainers",
    "gateways",
    "steps",
    "matrix",
    "soak",
    "trouble",
    "clients",
    "hands",
    "names",
    "drains",
    "weights",
    "sglang",
)


def load() -> None:
    """Register all of them, in the order in which they run."""
    for name in FILES:
        import_module(f"{__name__}.{name}")
