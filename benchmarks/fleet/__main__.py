"""How new weights come to a fleet that churns: `make bench-fleet-weights` (README.md has its figures)."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from rolloutmq.ops.redis import EmbeddedRedis
from rolloutmq.ops.tiny_model import write_tiny_model

from ..broker.environments import describe_host
from . import churn, deaths, real, simulated

RECEIVERS = 1000
SHAPES = ((32, 512 << 20, 1.25e9, 4e9), (32, 512 << 20, 12.5e9, 20e9))
"""Buckets, bytes of a bucket, bytes a second of a link, and of verifying: 17 GB over 10 and over 100 Gbit/s."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="where the results go, as JSON")
    parser.add_argument("--only", default="simulated,real,first,churn,deaths,sglang", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--versions", type=int, default=30, help="of the fleet that churns, and of the still one")
    asked = parser.parse_args()
    found: dict[str, Any] = {"torch": torch.__version__}
    with EmbeddedRedis() as server:
        found["host"] = describe_host(server.url, [])
    for part in asked.only.split(","):
        found[part] = PARTS[part](asked.versions)
        for line in found[part] if isinstance(found[part], list) else [found[part]]:
            print(part, json.dumps(line), flush=True)
        if asked.out is not None:
            asked.out.write_text(json.dumps(found, indent=2) + "\n")


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
    "first": lambda _: churn.first_to(64),
    "churn": churn.measure,
    "deaths": _deaths,
    "sglang": _sglang,
}

if __name__ == "__main__":
    main()
