"""The ledger of weights versions and transfers in Redis: announced, then committed or failed.

A transfer is called an epoch. Its states are joining -> sealed -> closed. At the seal it is fixed who takes part,
before anything is sent. A worker that is not in the sealed roster asks for a later transfer.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, Literal, TypeVar, cast, get_args

from pydantic import Field, TypeAdapter, ValidationError
from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from ...messages.broker import living_workers, tell_shards
from ...messages.codec import decode, encode
from ...messages.errors import InvalidField, MessageError, WeightSyncError
from ...messages.model import NCCL_AGREED, NCCL_CTAS, WeightAnnouncement
from ...messages.redis import Keys, is_wrong_type, name_once, text, whole
from ...messages.scripts import Scripts, calls
from .order import TransferReport

T = TypeVar("T")
REDIS_RETRY_S = 0.2
MAX_RANKS = 4096
"""Most processes of one engine. A join with more is ignored: a transfer with so many ranks could not be announced."""
SCANNED = 256
REMEMBER_S = 7 * 86400
"""Seconds that versions and epochs stay in the ledger."""

EpochState = Literal["joining", "sealed", "closed"]


async def through_outage(call: Callable[[], Awaitable[T]], deadline: float) -> T:
    """Return what `call` returns.

    While Redis is away it is tried again until `deadline` (time.monotonic), then raises.
    """
    while True:
        try:
            return await call()
        except (RedisError, OSError):
            if time.monotonic() >= deadline:
                raise
            await asyncio.sleep(REDIS_RETRY_S)


def nccl_settings() -> str:
    """Return this process's NCCL settings that all ranks of a group must share."""
    return " ".join([*(f"{name}={os.environ.get(name, '')}" for name in NCCL_AGREED), f"ctas={NCCL_CTAS}"])


@dataclass(frozen=True, slots=True)
class Join:
    """What a worker says when it joins a transfer.

    ranks: number of its engine's processes. cuda: whether its weights are on GPUs. gpu: the GPU's unique id, if it is
    one GPU. group: name of the process group that it is still in, "" for none. nccl: see `nccl_settings`.
    """

    ranks: Annotated[int, Field(ge=1, le=MAX_RANKS)]
    cuda: bool = False
    gpu: Annotated[str, Field(max_length=128)] = ""
    group: Annotated[str, Field(max_length=64)] = ""
    nccl: Annotated[str, Field(max_length=1024)] = field(default_factory=nccl_settings)


_JOIN = TypeAdapter(Join)


@dataclass(frozen=True, slots=True)
class Epoch:
    """A transfer as the ledger has it.

    joins, reports: by worker id. by: id of the worker that sends, "" for a trainer.
    """

    state: EpochState
    announcement: WeightAnnouncement
    joins: dict[str, Join]
    reports: dict[str, TransferReport]
    by: str = ""


class Ledger:
    """Reads and writes one pool's ledger. Every write is one idempotent script."""

    def __init__(self, redis: Redis, pool: str) -> None:
        # redis-py types a reply as the union over all modes and protocols. Here replies are RESP2 and bytes.
        self.redis: Any = redis
        self.keys = Keys(pool)
        self._scripts = Scripts(redis, self.keys)

    async def committed(self) -> int:
        """Return the newest committed version. 0 is the model as workers load it from disk."""
        return await self._number("committed")

    async def newest(self) -> int:
        """Return the newest version that was ever announced, committed or not; 0 before the first."""
        found = await self.redis.hmget(self.keys.weights, "committed", "highest")
        return max(whole(number, "weights: committed or highest") for number in found)

    async def committed_digest(self) -> tuple[int, str]:
        """Return the newest committed version and the digest of its manifest, "" if the sender did not give it."""
        version, digest = await self.redis.hmget(self.keys.weights, "committed", "digest")
        return whole(version, "weights: committed"), text(digest)

    async def open_epoch(self) -> int:
        """Return the number of the transfer under way, 0 for none."""
        return await self._number("open")

    async def _number(self, field: str) -> int:
        return whole(await self.redis.hget(self.keys.weights, field), f"weights: {field}")

    async def new_epoch(self) -> int:
        """Return a number that no other transfer of this pool has. A re-sent increment only skips one."""
        return int(await self.redis.hincrby(self.keys.weights, "epochs", 1))

    async def epoch(self, number: int) -> Epoch | None:
        """Return the transfer, or None if the ledger does not have it."""
        raw = await self.redis.hgetall(self.keys.epoch(number))
        if b"m" not in raw:
            return None
        fields: dict[str, Any] = {text(name): value for name, value in raw.items()}
        if (state := text(fields.get("st"))) not in get_args(EpochState):
            name_once(f"transfer {number}: its state is {state[:80]!r}: it counts as closed")
            state = "closed"
        return Epoch(
            state=cast(EpochState, state),
            announcement=decode(fields["m"], WeightAnnouncement),
            joins=_joins(fields),
            reports={name[7:]: _report(value) for name, value in fields.items() if name.startswith("report:")},
            by=text(fields.get("by")),
        )

    async def announce(self, announcement: WeightAnnouncement) -> None:
        """Open the transfer for joins and ring the bell. Raises WeightSyncError if other weights have the number."""
        message = encode(announcement)
        state = await self._scripts.run(calls.announce(announcement.epoch, _what(announcement), message, REMEMBER_S))
        if state == b"given":
            raise WeightSyncError(
                f"version {announcement.version}: an operator's command has given this number to other weights, "
                "publish under a higher one"
            )

    async def reserve(self, version: int, of: str) -> int:
        """Take a version number for weights that no trainer announced. No trainer can announce it any more.

        of: names the weights. The same weights may take the number again. Returns 0, or, if `version` is not above it,
        the newest number that is taken.
        """
        return int(await self._scripts.run(calls.reserve(version, of, REMEMBER_S)))

    async def offer(self, announcement: WeightAnnouncement, worker_id: str, over: int = 0) -> str:
        """Open a transfer of the newest version as a worker that has it, if others wait for it.

        over: number of an open transfer whose deadline has passed. Returns "ok", or why not: "nolease", "older" (the
        version is not the newest any more), "nobody" (waits), "busy" (another transfer is under way).
        """
        message = encode(announcement)
        answer: bytes = await self._scripts.run(
            calls.offer(announcement.epoch, announcement.version, message, REMEMBER_S, worker_id, over)
        )
        return answer.decode()

    async def join(self, epoch: int, worker_id: str, join: Join) -> bool:
        """Take part. Returns False if the transfer is sealed, or the worker holds no lease."""
        answer: bytes = await self._scripts.run(calls.join(epoch, worker_id, json.dumps(asdict(join))))
        return answer == b"ok"

    async def seal(self, announcement: WeightAnnouncement) -> None:
        """Close the transfer for joins. `announcement` now has roster and world size."""
        await self._scripts.run(calls.seal(announcement.epoch, encode(announcement)))

    async def report(self, epoch: int, worker_id: str, report: TransferReport, adapter: str = "") -> None:
        """Write how the transfer ended on a worker. After success the worker no longer counts as waiting for one."""
        told = replace(report, switched={}).to_json()  # `switched` is between the worker and its engine
        await self._scripts.run(calls.report(epoch, worker_id, told, int(report.ok), adapter))

    async def close(self, announcement: WeightAnnouncement, committed: bool, digest: str = "") -> None:
        """End the transfer. A committed version becomes the pool's, if it is the newest. digest: of its manifest."""
        state = "committed" if committed else "failed"
        await self._scripts.run(calls.close(announcement.epoch, _what(announcement), state, REMEMBER_S, digest))
        if committed:
            version, name = announcement.version, announcement.adapter
            known = {name: version} if name else {}
            await tell_shards(self.redis, self.keys.pool, 0 if name else version, known)

    async def adapters(self) -> dict[str, int]:
        """Return the pool's LoRA adapters: name -> newest committed version."""
        raw = await self.redis.hgetall(self.keys.weights)
        found = {text(name): whole(version, f"weights: {text(name)}") for name, version in raw.items()}
        return {name[8:]: version for name, version in found.items() if name.startswith("adapter:")}

    async def newest_adapters(self) -> dict[str, int]:
        """Return LoRA adapters: name -> newest version that was ever announced, committed or not."""
        raw = await self.redis.hgetall(self.keys.weights)
        newest: dict[str, int] = {}
        for key, version in raw.items():
            kind, colon, name = text(key).partition(":")
            if colon and kind in {"adapter", "highest"}:
                newest[name] = max(newest.get(name, 0), whole(version, f"weights: {text(key)}"))
        return newest

    async def version_state(self, version: int | str) -> str:
        """Return announced, committed, failed, given (by an operator's command), or "" if unknown."""
        return text(await self.redis.hget(self.keys.version(version), "st"))

    async def want(self, worker_id: str, version: int, adapter: str = "") -> None:
        """Ask for a transfer. version: what this worker has, of the weights or of an adapter."""
        await self._scripts.run(calls.want(worker_id, version, adapter))

    async def unwant(self, worker_id: str) -> None:
        """Withdraw the request for weights: the worker has got a version elsewhere."""
        await self.redis.hdel(self.keys.wanted, worker_id)

    async def wanted(self) -> dict[str, int]:
        """Return the workers that wait for a transfer of the weights: id -> the version that it has."""
        raw = await self._wishes()
        return {text(worker): whole(version, "wanted") for worker, version in raw.items() if b"@" not in worker}

    async def wanted_adapters(self) -> dict[str, dict[str, int]]:
        """Return who waits for adapters: adapter -> worker id -> the version that it has, 0 for none."""
        found: dict[str, dict[str, int]] = {}
        for wish, version in (await self._wishes()).items():
            adapter, at, worker = text(wish).partition("@")
            if at:
                found.setdefault(adapter, {})[worker] = whole(version, "wanted")
        return found

    async def _wishes(self) -> dict[bytes, bytes]:
        try:
            return {worker: has async for worker, has in self.redis.hscan_iter(self.keys.wanted, count=SCANNED)}
        except ResponseError as error:  # something else under its name: the next worker that asks has it put aside
            if not is_wrong_type(error):
                raise
            name_once(f"{self.keys.wanted}: {error}")
            return {}

    async def behind(self, version: int) -> set[str]:
        """Return the live workers that wait for a transfer and have less than `version`."""
        waiting = {worker for worker, has in (await self.wanted()).items() if has < version}
        return waiting & await self.live_workers() if waiting else set()

    async def live_workers(self) -> set[str]:
        """Return the workers whose lease has not run out."""
        return await living_workers(self.redis, self.keys)


def _what(announcement: WeightAnnouncement) -> int | str:
    """Return the scripts' name of the version."""
    return f"{announcement.adapter}@{announcement.version}" if announcement.adapter else announcement.version


def _joins(fields: dict[str, Any]) -> dict[str, Join]:
    joins = {}
    for name, value in fields.items():
        if name.startswith("join:"):
            try:
                joins[name[5:]] = _JOIN.validate_json(value, strict=True)
            except ValidationError:  # one bad join does not stop the others
                continue
    return joins


def _report(value: bytes) -> TransferReport:
    try:
        return TransferReport.from_json(value.decode(errors="replace"))
    except MessageError as error:  # one bad report does not stop the others
        return TransferReport(ok=False, phase="load", error=str(error))


# --- for people: nothing here decides anything ---------------------------------------------------------------------

FARTHEST = 10_000
"""Most transfers that LedgerView reads, newest first."""
PAGE = 64


@dataclass(frozen=True, slots=True)
class TransferRecord:
    """One transfer (epoch) of a version."""

    number: int
    epoch: Epoch

    @property
    def served(self) -> list[str]:
        """The workers on which it succeeded."""
        return sorted(worker for worker, report in self.epoch.reports.items() if report.ok)

    @property
    def failures(self) -> dict[str, str]:
        """Worker -> why it failed there: its report, or that it had not reported when the transfer was closed."""
        found = {w: f"{r.phase}: {r.error}" for w, r in self.epoch.reports.items() if not r.ok}
        if self.epoch.state == "closed":
            silent = self.epoch.announcement.roster.keys() - self.epoch.reports.keys()
            found |= dict.fromkeys(silent, "no report")
        return dict(sorted(found.items()))


@dataclass(frozen=True, slots=True)
class VersionRecord:
    """A version and its transfers, newest first.

    state: announced, committed, failed, given (by an operator's command), or "" if the ledger has only its transfers.
    announced_at, ended_at: Unix seconds by Redis' clock, None if not known.
    """

    version: int
    state: str
    announced_at: float | None
    ended_at: float | None
    transfers: tuple[TransferRecord, ...]


class LedgerView:
    """The ledger for people. It reads one record after the other, so what is announced meanwhile may be missing.

    Records that cannot be read are left out.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    async def versions(self, limit: int = 20) -> list[VersionRecord]:
        """Return the newest `limit` versions, newest first."""
        found: dict[int, list[TransferRecord]] = {}
        async for transfer in self._transfers():
            version = transfer.epoch.announcement.version
            if version not in found and len(found) == limit:
                break
            found.setdefault(version, []).append(transfer)
        return [await self._record(version, found[version]) for version in sorted(found, reverse=True)]

    async def version(self, version: int) -> VersionRecord:
        """Return one version.

        Raises WeightSyncError if the ledger does not have it, InvalidField for a number below 1.
        """
        if version < 1:
            raise InvalidField("version", version, "at least 1; 0 is the model as workers load it from disk")
        if not await self._ledger.version_state(version):
            raise WeightSyncError(f"the ledger knows no version {version}: never announced, or more than a week ago")
        found: list[TransferRecord] = []
        others = 0  # transfers of others since its last one: those of one version are close together
        async for transfer in self._transfers():
            others += 1
            if transfer.epoch.announcement.version == version:
                found.append(transfer)
                others = 0
            if found and others >= PAGE:
                break
        return await self._record(version, found)

    async def _transfers(self) -> AsyncIterator[TransferRecord]:
        """Yield transfers, newest first, until a page of numbers has none. Older ones have expired."""
        newest = whole(await self._ledger.redis.hget(self._ledger.keys.weights, "epochs"))
        missing = 0
        for number in range(newest, max(0, newest - FARTHEST), -1):
            try:
                epoch = await self._ledger.epoch(number)
            except MessageError:  # written by another major version
                epoch = None
            if epoch is not None:
                missing = 0
                if not epoch.announcement.adapter:
                    yield TransferRecord(number, epoch)
            elif (missing := missing + 1) >= PAGE:
                return

    async def _record(self, version: int, transfers: list[TransferRecord]) -> VersionRecord:
        raw = await self._ledger.redis.hgetall(self._ledger.keys.version(version))
        return VersionRecord(
            version=version,
            state=text(raw.get(b"st")),
            announced_at=_seconds(raw.get(b"at")),
            ended_at=_seconds(raw.get(b"closed")),
            transfers=tuple(transfers),
        )


def _seconds(millis: bytes | None) -> float | None:
    return whole(millis) / 1000 if millis else None
