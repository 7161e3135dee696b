"""A journal as a Parquet file."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from ....messages.errors import InvalidField
from ....messages.model import Float
from ...journal import Table, export
from .operation import Check, Context, HostPath, operation

TOLD = 20
"""The result has at most so many problems."""


@operation(timeout_s=6 * 3600)
async def journal_export(
    context: Context,
    *,
    journal: HostPath,
    out: HostPath,
    table: Table = "samples",
    since: Float | None = None,
    until: Float | None = None,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Write a journal's samples or events into a Parquet file.

    out: the file to write. table: samples with their notes, or events. since, until: Unix seconds. overwrite: a file
    that is there. The file appears when it is complete. A repeated run writes it anew.
    """
    problems: list[str] = []

    def write(_: Check) -> int:
        if "writing" not in context.notes:
            if Path(out).exists() and not overwrite:
                raise InvalidField("out", out, "a file that is not there yet; or overwrite=true")
            context.note(writing=True)
        return export(
            journal,
            Path(out),
            table,
            overwrite=True,
            on_problem=problems.append,
            since=-math.inf if since is None else since,
            until=math.inf if until is None else until,
        )

    rows = await context.blocking(write)
    return {"out": out, "rows": rows, "problems": list(dict.fromkeys(problems))[:TOLD]}
