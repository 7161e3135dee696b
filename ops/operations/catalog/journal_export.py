"""A journal as a Parquet file."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from pydantic import Field

from ....messages.errors import InvalidField
from ....messages.model import Float
from ...journal import Table, export
from .operation import Context, Operation, Params, operation

TOLD = 20
"""The result has at most so many problems."""


class JournalExportParams(Params):
    """journal: its folder on the worker's host. out: the file to write there. table: samples with their notes, or
    events. since, until: Unix seconds. overwrite: a file that is there."""

    journal: str = Field(pattern="^/")
    out: str = Field(pattern="^/")
    table: Table = "samples"
    since: Float | None = None
    until: Float | None = None
    overwrite: bool = False


@operation
class JournalExport(Operation[JournalExportParams]):
    """Write a journal's samples or events into a Parquet file."""

    name = "journal-export"
    params = JournalExportParams
    timeout_s = 6 * 3600

    async def run(self, context: Context, params: JournalExportParams) -> dict[str, Any]:
        """The file appears when it is complete. A repeated run writes it anew."""
        if "writing" not in context.notes:
            _check_out(params)
            context.note(writing=True)
        problems: list[str] = []
        rows = await context.blocking(
            lambda _check: export(
                params.journal,
                Path(params.out),
                params.table,
                overwrite=True,
                on_problem=problems.append,
                since=-math.inf if params.since is None else params.since,
                until=math.inf if params.until is None else params.until,
            )
        )
        return {"out": params.out, "rows": rows, "problems": list(dict.fromkeys(problems))[:TOLD]}


def _check_out(params: JournalExportParams) -> None:
    if Path(params.out).exists() and not params.overwrite:
        raise InvalidField("out", params.out, "a file that is not there yet; or overwrite=true")
