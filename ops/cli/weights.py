"""`rolloutmq weights`: versions in the pool's ledger, and on disk."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ...messages.defaults import DEFAULT_URL
from .options import Json, Pool, RedisUrl, Yes, group, say

app = group("Show weights versions, in the pool's ledger and on disk.")

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The folder that a SnapshotStore has.")]


@app.command("list")
def list_versions(
    redis: RedisUrl = DEFAULT_URL,
    pool: Pool = "default",
    limit: Annotated[int, typer.Option(min=1, max=1000, help="At most so many versions.")] = 10,
    json: Json = False,
) -> None:
    """The newest versions, newest first: their transfers, who has them, adapters, and what each worker serves."""
    from ..weights_ledger import ledger_state, list_lines

    state = asyncio.run(ledger_state(redis, pool, limit))
    say(state, list_lines(state), json)


@app.command()
def show(
    version: Annotated[int, typer.Argument(metavar="VERSION", help="Number of the version.")],
    redis: RedisUrl = DEFAULT_URL,
    pool: Pool = "default",
    json: Json = False,
) -> None:
    """One version: every transfer of it, who took part, and how it went there."""
    from ..weights_ledger import show_lines, version_state

    record = asyncio.run(version_state(redis, pool, version))
    say(record, show_lines(record), json)


@app.command()
def reset(redis: RedisUrl = DEFAULT_URL, pool: Pool = "default", yes: Yes = False, json: Json = False) -> None:
    """Begin again from the workers' checkpoint, if the pool's version is lost. Refused while somebody can send it."""
    from ..weights_ledger import reset_weights

    if not yes:
        typer.confirm(f"let the workers of pool {pool} serve the checkpoint that they have?", abort=True, err=True)
    before = asyncio.run(reset_weights(redis, pool))
    told = f"version {before} is the pool's no more: workers serve their checkpoint, version 0, within seconds"
    say({"before": before, "committed_version": 0}, [told, f"the next one to publish is {before + 1} or higher"], json)


@app.command()
def snapshots(
    folder: Folder,
    verify: Annotated[bool, typer.Option("--verify", help="Compare every byte with its digest.")] = False,
    json: Json = False,
) -> None:
    """Versions on disk, oldest first. Exit code 1 if one cannot be used."""
    from .. import weights_disk

    found = weights_disk.snapshots(folder, verify=verify)
    say([asdict(one) for one in found], weights_disk.lines(found), json)
    raise typer.Exit(int(any(one.problem for one in found)))


@app.command()
def gc(
    folder: Folder,
    keep: Annotated[int, typer.Option(min=1, help="Newest versions that stay, besides pinned ones.")],
    yes: Yes = False,
    json: Json = False,
) -> None:
    """Remove old versions from disk, except those that are pinned or being read."""
    from ..weights_disk import store

    versions = store(folder, keep)
    if not yes:
        count = len(versions.versions())
        typer.confirm(f"of {count} versions in {folder}, remove all but the newest {keep}?", abort=True, err=True)
    removed = versions.collect()
    left = versions.versions()
    say({"removed": removed, "left": left}, [f"removed {_list(removed)}; left {_list(left)}"], json)


@app.command()
def pin(
    folder: Folder,
    version: Annotated[int, typer.Argument(metavar="VERSION", help="Number of the version.")],
    remove: Annotated[bool, typer.Option("--remove", help="Take the pin away.")] = False,
    json: Json = False,
) -> None:
    """Keep a version on disk, however old it gets."""
    from ..weights_disk import store

    versions = store(folder)
    (versions.unpin if remove else versions.pin)(version)
    pinned = sorted(versions.pinned())
    say({"pinned": pinned}, [f"pinned: {_list(pinned)}"], json)


def _list(versions: list[int]) -> str:
    return ", ".join(map(str, versions)) or "none"
