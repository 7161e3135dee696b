"""`rolloutmq status`: the pool at a glance, for people and for scripts."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..messages.broker import Broker, DeadLetters
from ..messages.model import PRIORITIES
from ..sync.transfer import Ledger
from .redis import connected


async def pool_state(redis_url: str, pool: str) -> dict[str, Any]:
    """Queue, workers, weights and dead letters as plain data."""
    async with connected(redis_url, pool) as redis:
        broker, ledger = Broker(redis, pool), Ledger(redis, pool)
        load, workers = await broker.load(), await broker.workers()
        alive = await ledger.live_workers()
        return {
            "pool": pool,
            "queued": dict(zip(PRIORITIES, load.queued, strict=True)),
            "open_jobs": load.open_jobs,
            "open_bytes": load.open_bytes,
            "unread_bytes": load.unread_bytes,
            "ended": {
                "done": load.done,
                "cancelled": load.cancelled,
                "expired": load.expired,
                "dead": load.dead,
            },
            "committed_version": await ledger.committed(),
            "transfer_under_way": await ledger.open_epoch(),
            "waiting_for_weights": sorted(await ledger.wanted()),
            "workers": [w.model_dump() | {"alive": w.worker_id in alive} for w in workers],
            "dead_letters": [
                {"job_id": d.job_id, "cause": d.cause, "error": d.error, "host": d.host, "at": d.at}
                for d in await DeadLetters(broker).page(count=5)
            ],
        }


def show_status(redis_url: str, pool: str, *, as_json: bool) -> None:
    """Print the state of a pool. Raises RedisUnavailable, ConfigError, InvalidField."""
    state = asyncio.run(pool_state(redis_url, pool))
    if as_json:
        print(json.dumps(state))
        return
    console = Console()
    queued = ", ".join(f"{count} {name}" for name, count in state["queued"].items())
    ended = ", ".join(f"{count} {name}" for name, count in state["ended"].items())
    console.print(f"[bold]pool {escape(pool)}[/bold]   weights version {state['committed_version']}")
    console.print(f"open: {state['open_jobs']} jobs, {state['open_bytes']:,} bytes   queued: {queued}")
    if state["unread_bytes"]:
        console.print(f"results that wait for their clients: {state['unread_bytes']:,} bytes")
    console.print(f"ended: {ended}")
    if state["workers"]:
        console.print(_table(state["workers"]))
    else:
        console.print("no workers: start one with  rolloutmq worker --model …")
    for letter in state["dead_letters"]:
        said = escape(f"{letter['job_id']}: {letter['cause']}: {letter['error']}")
        console.print(f"[red]dead[/red] {said}")


def _table(workers: list[dict[str, Any]]) -> Table:
    """What workers say of themselves; escaped, as theirs are the words and rich's the brackets."""
    table = Table("worker", "state", "version", "running", "held", "samples", "tokens", "engine", "up")
    for worker in workers:
        table.add_row(
            escape(worker["worker_id"]),
            escape(worker["state"]) if worker["alive"] else "[red]silent[/red]",
            str(worker["version"]),
            f"{worker['running']}/{worker['max_running']}",
            str(worker["held"]),
            f"{worker['finished_samples']:,}",
            f"{worker['generated_tokens']:,}",
            escape(f"{worker['engine']} on {worker['device']}"),
            f"{max(0, time.time() - worker['started_at']):.0f} s",
        )
    return table
