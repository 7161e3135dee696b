"""Cases by number: made from a seed, or kept in the corpus because they once broke something."""

from __future__ import annotations

import traceback
import warnings
from pathlib import Path
from random import Random
from typing import Any

import msgpack

from fuzz.targets import TARGETS

CORPUS = Path(__file__).parent / "corpus"
"""<target>.hex: a case per line, as hex digits of msgpack. Behind a # is why it is there."""


def made(name: str, seed: int, number: int) -> Any:
    """Case `number` of a target. It depends on these three alone."""
    return TARGETS[name].make(Random(f"{seed}:{name}:{number}"))


def kept(name: str) -> list[Any]:
    """The cases of a target in the corpus."""
    path = CORPUS / f"{name}.hex"
    lines = [line.partition("#")[0].strip() for line in path.read_text().splitlines()] if path.exists() else []
    return [msgpack.unpackb(bytes.fromhex(line), strict_map_key=False) for line in lines if line]


def as_line(case: Any) -> str:
    """The case as a line of the corpus."""
    return bytes(msgpack.packb(case)).hex()


def replay_line(name: str, seed: int, number: int) -> str:
    return f"make fuzz SEED={seed} ONLY={name} CASE={number}"


async def failure(name: str, seed: int, number: int) -> str | None:
    """What went wrong with a case, with the line for the corpus; None if nothing did."""
    case = made(name, seed, number)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            await TARGETS[name].run(case)
    except Exception:
        line = as_line(case)
        return f"{traceback.format_exc()}\ncorpus/{name}.hex: {line if len(line) < 4000 else 'too long to keep'}"
    return None
