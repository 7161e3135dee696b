"""`rolloutmq weights`: versions in the pool's ledger; `rolloutmq snapshots`: versions on disk."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Literal

import typer

from ...messages.defaults import DEFAULT_URL
from ...messages.errors import ConfigError
from .options import Json, Pool, RedisUrl, Yes, say


def weights(
    do: Annotated[
        Literal["list", "show", "reset"], typer.Argument(metavar="ACTION", help="list, show or reset.")
    ] = "list",
    version: Annotated[int | None, typer.Argument(metavar="VERSION", help="To show: number of the version.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="With list: at most so many versions.")] = 10,
    redis: RedisUrl = DEFAULT_URL,
    pool: Pool = "default",
    yes: Yes = False,
    json: Json = False,
) -> None:
    """Show weights versions in the pool's ledger.

    list: the newest ones, newest first, with their transfers, who has them, adapters, and what each worker serves.
    show: every transfer of one version, who took part, and how it went there. reset: begin again from the workers'
    checkpoint, if the pool's version is lost; it is refused while somebody can send it.
    """
    from ..weights_ledger import ledger_state, list_lines, reset_weights, show_lines, version_state

    if (version is None) == (do == "show"):
        raise ConfigError("give the version with show, and with nothing else")
    if version is not None:
        record = asyncio.run(version_state(redis, pool, version))
        say(record, show_lines(record), json)
    elif do == "list":
        state = asyncio.run(ledger_state(redis, pool, limit))
        say(state, list_lines(state), json)
    else:
        if not yes:
            typer.confirm(f"let the workers of pool {pool} serve the checkpoint that they have?", abort=True, err=True)
        before = asyncio.run(reset_weights(redis, pool))
        told = f"version {before} is the pool's no more: workers serve their checkpoint, version 0, within seconds"
        next_one = f"the next one to publish is {before + 1} or higher"
        say({"before": before, "committed_version": 0}, [told, next_one], json)


def snapshots(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder that a SnapshotStore has.")],
    verify: Annotated[bool, typer.Option("--verify", help="Compare every byte with its digest.")] = False,
    keep: Annotated[
        int | None,
        typer.Option(min=1, help="Remove all but so many newest versions, and those that are pinned or being read."),
    ] = None,
    pin: Annotated[list[int] | None, typer.Option(help="A version to keep, however old it gets.")] = None,
    unpin: Annotated[list[int] | None, typer.Option(help="A version whose pin to take away.")] = None,
    yes: Yes = False,
    json: Json = False,
) -> None:
    """List weights versions on disk; pin and remove them. Exit code 1 if one cannot be used.

    \b
    rolloutmq snapshots /data/weights --verify
    rolloutmq snapshots /data/weights --pin 12 --keep 3
    """
    from .. import weights_disk

    store = weights_disk.store_in(folder, keep or 1)
    for version in pin or []:
        store.pin(version)
    for version in unpin or []:
        store.unpin(version)
    if keep is not None:
        if not yes:
            count = len(store.versions())
            typer.confirm(f"of {count} versions in {folder}, remove all but the newest {keep}?", abort=True, err=True)
        store.collect()
    found = weights_disk.snapshots(folder, verify=verify)
    say(found, weights_disk.lines(found), json)
    raise typer.Exit(int(any(one["problem"] for one in found)))
