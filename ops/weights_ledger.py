"""The ledger as plain data and as lines for people: `rolloutmq weights list` and `show`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from ..messages.broker import broker_of
from ..producer.diagnosis import read_pool
from ..sync.transfer import Epoch, Ledger, VersionRecord, begin_again, newest_versions, one_version
from .redis import connected
from .terminal import printable, when

Plain = dict[str, Any]


async def ledger_state(redis_url: str, pool: str, limit: int) -> Plain:
    """Newest versions, newest first, of adapters the newest alone, and who serves what. Raises as `connected` does."""
    async with connected(redis_url, pool, all_shards=True) as redis:
        ledger = Ledger(redis, pool)
        alive = await ledger.live_workers()
        return {
            "pool": pool,
            "committed_version": await ledger.committed(),
            "transfer_under_way": await ledger.open_epoch(),
            "workers": [
                {"worker_id": w.worker_id, "host": w.host, "state": w.state, "version": w.version}
                | {"alive": w.worker_id in alive, "hold_version": w.hold_version}
                for w in await broker_of(redis, pool).workers()
            ],
            "versions": [_plain(record) for record in await newest_versions(ledger, limit)],
            "adapters": dict(sorted((await ledger.adapters()).items())),
        }


async def version_state(redis_url: str, pool: str, version: int) -> Plain:
    """One version and all that is remembered of its transfers. Raises WeightSyncError for one that is not known."""
    async with connected(redis_url, pool, all_shards=True) as redis:
        return _plain(await one_version(Ledger(redis, pool), version))


async def reset_weights(redis_url: str, pool: str) -> int:
    """The version that is the pool's no more; see `begin_again`. Raises as `connected` does, and WeightSyncError."""
    async with connected(redis_url, pool, all_shards=True) as redis:
        return await begin_again(redis, pool, (await read_pool(broker_of(redis, pool))).having)


def _plain(record: VersionRecord) -> Plain:
    return {
        "version": record.version,
        "state": record.state,
        "announced_at": record.announced_at,
        "ended_at": record.ended_at,
        "transfers": [_transfer(transfer) for transfer in record.transfers],
    }


def _transfer(transfer: Epoch) -> Plain:
    said = transfer.announcement.model_dump(mode="json", exclude={"version", "epoch", "token"})
    return {
        "epoch": transfer.announcement.epoch,
        "state": transfer.state,
        **said,
        "served": transfer.served,
        "failures": transfer.failures,
        "reports": {worker: asdict(report) for worker, report in sorted(transfer.reports.items())},
    }


def list_lines(state: Plain) -> Iterator[str]:
    """`ledger_state` for people."""
    under_way = f"   transfer {state['transfer_under_way']} under way" if state["transfer_under_way"] else ""
    yield f"pool {state['pool']}   committed version {state['committed_version']}{under_way}"
    for record in state["versions"]:
        yield _head(record)
        # The newest transfer tells how it stands; a worker that failed there may have the version from an earlier one.
        served = {worker for transfer in record["transfers"] for worker in transfer["served"]}
        newest = record["transfers"][0]
        epochs = ", ".join(str(transfer["epoch"]) for transfer in reversed(record["transfers"]))
        yield printable(f"    epochs {epochs}; received by {_names(served)}")
        for worker, why in newest["failures"].items():
            yield printable(f"    {worker}: {why}")
    if not state["versions"]:
        yield "no version was published: workers serve the model as they load it from disk"
    for name, version in state["adapters"].items():
        yield printable(f"adapter {name}: version {version}")
    for worker in state["workers"]:
        newest = state["committed_version"] if worker["hold_version"] is None else worker["hold_version"]
        behind = worker["alive"] and worker["version"] < newest
        waits = ", waits for a newer one" if behind else ""
        said = worker["state"] if worker["alive"] else "silent"
        yield printable(f"worker {worker['worker_id']} on {worker['host']}: {said}, version {worker['version']}{waits}")


def show_lines(record: Plain) -> Iterator[str]:
    """`version_state` for people."""
    yield _head(record)
    for transfer in record["transfers"]:
        yield printable(
            f"epoch {transfer['epoch']}: {transfer['state']}, {transfer['mode']} "
            f"from {transfer['host']}:{transfer['port']}"
        )
        for worker in sorted({*transfer["reports"], *transfer["failures"]}):
            yield printable(f"    {worker}: {_outcome(transfer, worker)}")


def _outcome(transfer: Plain, worker: str) -> str:
    if worker in transfer["failures"]:
        return str(transfer["failures"][worker])
    report = transfer["reports"][worker]
    seconds = ", ".join(f"{name[:-2]} {value:.3f} s" for name, value in report.items() if name.endswith("_s"))
    unread = "" if report["readback"] else "; not read back"
    return f"{report['tensors']:,} tensors, {report['nbytes']:,} bytes by {report['way']}; {seconds}{unread}"


def _head(record: Plain) -> str:
    ended = f", {record['state']} {when(record['ended_at'])}" if record["ended_at"] else f", {record['state']}"
    return f"version {record['version']}: announced {when(record['announced_at'])}{ended}"


def _names(workers: list[str] | set[str]) -> str:
    return ", ".join(sorted(workers)) or "none"
