"""Copies of snapshots in another folder or at a URL."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from ....messages.model import Int
from ....sync.disk import export_version
from ...weights_disk import store_in
from .operation import Check, Context, HostPath, operation


@operation(timeout_s=24 * 3600)
async def snapshots_export(
    context: Context,
    *,
    folder: HostPath,
    to: Annotated[str, Field(pattern=r"^(/|[a-z][a-z0-9+.-]*://)")],
    versions: tuple[Int, ...] = (),
) -> dict[str, Any]:
    """Copy snapshots of weights to another folder or URL, and compare every copy with what was read.

    to: an absolute folder, or a URL for fsspec. versions: which ones; all that are there if none is given. What is
    there already is left alone, so a repeated run copies the rest.
    """

    def copy(check: Check) -> dict[str, Any]:
        store = store_in(folder)
        chosen = list(versions) or store.versions()
        done: dict[bool, list[int]] = {True: [], False: []}
        nbytes = 0
        for number, version in enumerate(chosen):
            context.progress(number, len(chosen), f"version {version}", now=True)
            with store.load(version) as found:
                copied = export_version(found, to, check)
                done[copied].append(version)
                nbytes += found.nbytes * copied
        context.progress(len(chosen), len(chosen), now=True)
        return {"exported": done[True], "there": done[False], "nbytes": nbytes}

    return await context.blocking(copy)
