"""`rolloutmq cancel` and `rolloutmq replies`: what clients have in a pool, for operators."""

from __future__ import annotations

from typing import Annotated

import typer

from ...messages.broker import Broker
from ...messages.errors import ConfigError, InvalidField
from ...messages.ids import is_id
from ...messages.redis import DEFAULT_URL
from ..redis import ask
from ..terminal import printable
from .errors import plain_errors
from .options import Pool, RedisUrl

replies = typer.Typer(help="Results that wait for their clients.", no_args_is_help=True)


def cancel(
    jobs: Annotated[list[str] | None, typer.Argument(metavar="[JOB]...", help="Job ids.")] = None,
    client: Annotated[str, typer.Option(help="Instead of ids: every open job of this client.")] = "",
    group: Annotated[str, typer.Option(help="With --client: only those of this group.")] = "",
    keep: Annotated[
        bool, typer.Option("--keep", help="Of jobs by id, publish what their samples have so far.")
    ] = False,
    redis: RedisUrl = DEFAULT_URL,
    pool: Pool = "default",
) -> None:
    """Cancel jobs, queued or running. Their clients are told; samples that were published stand."""
    with plain_errors():
        if bool(jobs) == bool(client) or (group and not client) or (keep and client):
            raise ConfigError("give job ids (and --keep), or --client, or --client and --group")
        for job in jobs or []:
            if not is_id(job):
                raise InvalidField("job", job, "32 lower-case hex digits")
        cause = "cancelled by an operator"
        if client:
            count = ask(redis, pool, lambda broker: broker.cancel_client(client, group or None, cause))
            typer.echo(f"cancelled {count} jobs")
            return

        async def end(broker: Broker) -> list[str]:
            return await (broker.stop if keep else broker.cancel)(jobs or [], cause)

        states = ask(redis, pool, end)
    said = {"ok": "stopped" if keep else "cancelled", "unbegun": "cancelled"}
    for job, state in zip(jobs or [], states, strict=True):
        typer.echo(f"{job} {said.get(state, f'was {state}')}")
    if not said.keys() & set(states):
        raise typer.Exit(1)


@replies.command("list")
def list_replies(redis: RedisUrl = DEFAULT_URL, pool: Pool = "default") -> None:
    """Clients with results that wait to be taken, the largest amount first."""

    async def read(broker: Broker) -> list[tuple[str, int, int, int]]:
        return [
            (client, nbytes, await broker.count_replies(client), len(await broker.open_jobs(client)))
            for client, nbytes in (await broker.unread()).items()
        ]

    with plain_errors():
        found = ask(redis, pool, read)
    for client, nbytes, count, open_jobs in sorted(found, key=lambda row: -row[1]):
        typer.echo(f"{printable(client)}  {count:,} results  {nbytes:,} bytes  {open_jobs:,} jobs open")
    if not found:
        typer.echo("no results wait")


@replies.command("drop")
def drop_replies(
    client: Annotated[str, typer.Argument(help="The client that will not come back.")],
    redis: RedisUrl = DEFAULT_URL,
    pool: Pool = "default",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Throw away what waits for a client. Its open jobs go on; cancel them first."""
    with plain_errors():
        count = ask(redis, pool, lambda broker: broker.count_replies(client))
        if count and not yes:
            typer.confirm(f"throw away {count} results of {client}?", abort=True)
        typer.echo(f"dropped {ask(redis, pool, lambda broker: broker.drop_replies(client))} results")
