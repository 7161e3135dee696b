"""Copies of snapshots in another folder or at a URL."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from ....messages.model import Int
from ....sync.disk import export_version
from ...weights_disk import store_in
from .operation import Check, Context, Operation, Params, operation


class SnapshotsExportParams(Params):
    """folder: of the snapshots, on the worker's host. to: another absolute folder, or a URL for fsspec. versions: which
    ones; all that are there if none is given."""

    folder: str = Field(pattern="^/")
    to: str = Field(pattern=r"^(/|[a-z][a-z0-9+.-]*://)")
    versions: tuple[Int, ...] = ()


@operation
class SnapshotsExport(Operation[SnapshotsExportParams]):
    """Copy snapshots of weights to another folder or URL, and compare every copy with what was read."""

    name = "snapshots-export"
    params = SnapshotsExportParams
    timeout_s = 24 * 3600

    async def run(self, context: Context, params: SnapshotsExportParams) -> dict[str, Any]:
        """What is there already is left alone, so a repeated run copies the rest."""
        return await context.blocking(lambda check: _export(context, params, check))


def _export(context: Context, params: SnapshotsExportParams, check: Check) -> dict[str, Any]:
    store = store_in(params.folder)
    versions = list(params.versions) or store.versions()
    done: dict[bool, list[int]] = {True: [], False: []}
    nbytes = 0
    for number, version in enumerate(versions):
        context.progress(number, len(versions), f"version {version}", now=True)
        with store.load(version) as found:
            copied = export_version(found, params.to, check)
            done[copied].append(version)
            nbytes += found.nbytes * copied
    context.progress(len(versions), len(versions), now=True)
    return {"exported": done[True], "there": done[False], "nbytes": nbytes}
