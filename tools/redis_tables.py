"""Writes the tables of docs/redis.md: keys, fields and what they hold, from the docstrings in messages/redis.

`PYTHONPATH=.venv/src python tools/redis_tables.py`
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from itertools import pairwise
from pathlib import Path
from typing import Any

from rolloutmq.messages.redis import fields, keys

PAGE = Path(__file__).parents[1] / "docs" / "redis.md"
BEGINS, ENDS = "## What is in it\n", "\n## TLS\n"
LIVES = {"fixed": "", "ttl": ", with a TTL", "worker": ", while the worker lives", "job": ", after its end with a TTL"}


def docstrings(of: Any) -> dict[str, str]:
    """Attribute of a class -> the text below it."""
    body = ast.parse(textwrap.dedent(inspect.getsource(of))).body[0].body  # type: ignore[attr-defined]
    pairs = [(it, below) for it, below in pairwise(body) if isinstance(it, ast.Assign)]
    return {it.targets[0].id: " ".join(below.value.value.split()) for it, below in pairs}  # type: ignore[attr-defined]


def table() -> str:
    told = docstrings(keys.Keys)
    lines = ["All keys begin with `rmq:{POOL}:`.", "", "| key | holds |", "|---|---|"]
    for key in keys.KEYS:
        name = f"{key.name}&lt;{key.of}&gt;" if key.of else key.name
        lines.append(f"| {name} | {key.type.upper() or 'A KEY'}{LIVES.get(key.life, '')}: {told[key.attribute]} |")
    for record, of in (
        (fields.JOB, "A job's record"),
        (fields.ENTRY, "An entry of `reply`"),
        (fields.SESSION, "A recorded session"),
    ):
        lines += ["", f"| {of} | holds |", "|---|---|"]
        lines += [f"| `{getattr(record, name)}` {name} | {text} |" for name, text in docstrings(record).items()]
    return "\n".join(lines) + "\n"


def page() -> str:
    before, _, rest = PAGE.read_text().partition(BEGINS)
    return before + BEGINS + "\n" + table() + ENDS + rest.partition(ENDS)[2]


if __name__ == "__main__":
    PAGE.write_text(page())
