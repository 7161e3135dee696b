"""How new weights come to a fleet that churns: `make bench-fleet-weights` (README.md has its figures)."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rolloutmq.ops.tiny_model import write_tiny_model

from ..harness import Run, names, option
from . import churn, deaths, real, simulated

RECEIVERS = 1000
SHAPES = ((32, 512 << 20, 1.25e9, 4e9), (32, 512 << 20, 12.5e9, 20e9))
"""Buckets, bytes of a bucket, bytes a second of a link, and of verifying: 17 GB over 10 and over 100 Gbit/s."""


def _simulated(_versions: int) -> list[dict[str, Any]]:
    told = ({"link": link, "verify": verify} for _, _, link, verify in SHAPES)
    return [
        simulated.measure(RECEIVERS, buckets, nbytes, runs=10, death_every_s=10.0, **rates)
        for (buckets, nbytes, _, _), rates in zip(SHAPES, told, strict=True)
    ]


def _deaths(_versions: int) -> list[dict[str, Any]]:
    return [line for lease_s in (10.0, 60.0) for line in deaths.measure(lease_s)]


def _sglang(_versions: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        write_tiny_model(Path(folder), layers=4, width=256)  # 9 buckets
        return deaths.measure(60.0, folder)


PARTS = {
    "simulated": _simulated,
    "real": lambda _: real.measure(),
    "churn": churn.measure,
    "deaths": _deaths,
    "sglang": _sglang,
}


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure."""

    only: str = option(",".join(PARTS), f"Of {', '.join(PARTS)}.")
    versions: int = option(30, "Of the fleet that churns, and of the still one.", min=1)


def measure(plan: Plan, run: Run) -> dict[str, Any]:
    """From `publish` until a version is verified at each survivor, of a fleet that churns."""
    found: dict[str, Any] = {}
    for part in names("--only", plan.only, PARTS):
        found[part] = PARTS[part](plan.versions)
        for line in found[part] if isinstance(found[part], list) else [found[part]]:
            run.say(part, **line)
        run.keep(found)
    return found
