"""The ledger of weights versions and transfers in Redis: announced, then committed or failed.

A transfer is called an epoch. It is open until its sender closes it. Nobody signs up for it in Redis: whoever hears of
it goes to the sender, and reports here what became of it. The first report of a worker that serves the version commits
it. The ledger also has who offers the committed version to those that come late.
"""

from __future__ import annotations

import asyncio
import binascii
import json
import time
from base64 import b64decode, b64encode
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar, cast, get_args

from pydantic import TypeAdapter, ValidationError
from redis.asyncio import Redis
from redis.exceptions import RedisError

from ...messages.broker import living_workers, tell_shards
from ...messages.codec import decode, encode
from ...messages.errors import MessageError, WeightSyncError
from ...messages.model import WeightAnnouncement
from ...messages.redis import Keys, Ring, name_once, text, whole
from ...messages.scripts import Scripts, calls
from .order import TransferReport, VersionHolder

T = TypeVar("T")
REDIS_RETRY_S = 0.2
ASKED = 4
"""Holders of a version that one look returns."""
REMEMBER_S = 7 * 86400
"""Seconds that versions and epochs stay in the ledger."""
TRANSFERS = 1024
"""Entries of the stream that senders read, about as many as weights/report.lua keeps."""

EpochState = Literal["open", "closed"]


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


_HOLDER = TypeAdapter(VersionHolder)
_LOST = TypeAdapter(dict[str, str])


@dataclass(frozen=True, slots=True)
class Epoch:
    """A transfer as the ledger has it.

    reports: by worker id. lost: worker id -> why it has not reported, once the transfer is closed.
    """

    state: EpochState
    announcement: WeightAnnouncement
    reports: dict[str, TransferReport]
    lost: dict[str, str] = field(default_factory=dict)

    @property
    def served(self) -> list[str]:
        """The workers on which it succeeded."""
        return sorted(worker for worker, report in self.reports.items() if report.ok)

    @property
    def failures(self) -> dict[str, str]:
        """Worker -> why it failed there: its report, or why it had not reported when the transfer was closed."""
        found = {w: f"{r.phase}: {r.error}" for w, r in self.reports.items() if not r.ok and r.phase != "held"}
        found |= {worker: why for worker, why in self.lost.items() if worker not in self.reports}
        return dict(sorted(found.items()))


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
            reports={name[7:]: read_report(value) for name, value in fields.items() if name.startswith("report:")},
            lost=_lost(fields.get("lost")),
        )

    async def announce(self, announcement: WeightAnnouncement) -> None:
        """Open the transfer and ring the bell. Raises WeightSyncError if other weights have the number, or a higher."""
        message, what = encode(announcement), _what(announcement)
        told = b64encode(message).decode()
        call = calls.announce(announcement.epoch, what, message, REMEMBER_S, told, announcement.digest)
        state = await self._scripts.run(call)
        if state == b"taken":
            raise WeightSyncError(
                f"version {announcement.version}: another trainer or an operator's command has given this number or a "
                "higher one to other weights; a new publisher's last_version says which, publish under a higher one"
            )

    async def reserve(self, version: int, of: str) -> int:
        """Take a version number for weights that no trainer announced. No trainer can announce it any more.

        of: names the weights. The same weights may take the number again. Returns 0, or, if `version` is not above it,
        the newest number that is taken.
        """
        return int(await self._scripts.run(calls.reserve(version, of, REMEMBER_S)))

    async def heading(self) -> tuple[int, str, int]:
        """Return the newest committed version, the digest of its manifest, and the transfer under way (0 for none)."""
        committed, digest, opened = await self.redis.hmget(self.keys.weights, "committed", "digest", "open")
        return whole(committed, "weights: committed"), text(digest), whole(opened, "weights: open")

    async def announced(self, number: int) -> WeightAnnouncement | None:
        """Return what an open transfer brings, or None if it is closed or unknown."""
        message, state = await self.redis.hmget(self.keys.epoch(number), "m", "st")
        return decode(message, WeightAnnouncement) if message and state == b"open" else None

    async def digest_of(self, version: int) -> str:
        """Return the digest of a committed version's manifest, "" if the ledger has forgotten it."""
        state, number = await self.redis.hmget(self.keys.version(version), "st", "epoch")
        message = await self.redis.hget(self.keys.epoch(whole(number)), "m") if state == b"committed" else None
        return decode(message, WeightAnnouncement).digest if message else ""

    async def goes_on(self, told: WeightAnnouncement) -> bool:
        """Whether a transfer is still under way, or ended with a version that some worker serves."""
        state = await self.redis.hget(self.keys.epoch(told.epoch), "st")
        return state == b"open" or (bool(state) and await self.version_state(_what(told)) == "committed")

    async def holders(self, version: int) -> tuple[VersionHolder | None, list[VersionHolder]]:
        """Return the trainer, if it offers `version`, the newest committed one, and some of the workers that do."""
        found: list[Any] = await self.redis.hrandfield(self.keys.holders, ASKED, withvalues=True)
        trainer = await self.redis.hget(self.keys.holders, "")
        said = [value for name, value in zip(found[::2], found[1::2], strict=True) if name]
        told = [holder for value in (trainer, *said) if value and (holder := holder_of(value)) is not None]
        here = [holder for holder in told if holder.version == version]
        first = here.pop(0) if trainer and here and here[0] == holder_of(trainer) else None
        return first, here

    @staticmethod
    def offering(holders: Mapping[bytes, bytes], version: int) -> list[bytes]:
        """Return who offers `version`, of the hash `holders`."""
        return [name for name, value in holders.items() if (told := holder_of(value)) and told.version == version]

    async def adapter_holder(self, name: str) -> VersionHolder | None:
        """Return who offers the newest committed version of an adapter."""
        raw = await self.redis.hget(self.keys.weights, f"at:{name}")
        return holder_of(raw) if raw else None

    async def holds(self, worker_id: str, holder: VersionHolder) -> None:
        """Say that a worker, which got the committed version by itself, offers it to others."""
        await self.redis.hset(self.keys.holders, worker_id, holder.to_json())

    async def report(self, told: WeightAnnouncement, worker_id: str, report: TransferReport) -> bool:
        """Write how the transfer ended on a worker. The first one that serves the version commits it.

        Returns whether jobs waited for it.
        """
        holder = ""
        if report.ok and report.holder and not told.adapter:
            holder = VersionHolder(told.version, report.holder, told.token).to_json()
        said = replace(report, switched={}, anew=()).to_json()  # these two are between the worker and its engine
        what, ok = _what(told), int(report.ok)
        call = calls.report(told.epoch, worker_id, said, ok, what, REMEMBER_S, told.digest, holder)
        how, waiting = await self._scripts.run(call)
        if how == b"committed":
            await self.tell_shards(told)
        return bool(waiting)

    async def later(self, told: WeightAnnouncement, worker_id: str, seconds: float) -> None:
        """Say that a worker takes a version, or a newer one, in so many seconds. Only the sender hears of it."""
        entry = {"epoch": told.epoch, "worker": worker_id, "later": f"{seconds:.3f}"}
        await self.redis.xadd(self.keys.transfers, entry, maxlen=TRANSFERS, approximate=True)

    async def close(
        self, told: WeightAnnouncement, committed: bool, holder: VersionHolder | None, lost: dict[str, str]
    ) -> bool:
        """End the transfer. A committed version becomes the pool's, if it is the newest.

        holder: where the sender offers it from now on. lost: worker -> why it has not reported.
        Returns whether the version is committed: a worker may have reported it meanwhile.
        """
        state = "committed" if committed else "failed"
        where = holder.to_json() if holder is not None else ""
        call = calls.close(told.epoch, _what(told), state, REMEMBER_S, told.digest, where, json.dumps(lost))
        ended = await self._scripts.run(call)
        if ended == b"committed":
            await self.tell_shards(told)
        return bool(ended == b"committed")

    async def tell_shards(self, told: WeightAnnouncement) -> None:
        """Tell the other shards that a version is committed."""
        version, name = told.version, told.adapter
        await tell_shards(self.redis, self.keys.pool, 0 if name else version, {name: version} if name else {})

    async def adapters(self) -> dict[str, int]:
        """Return the pool's LoRA adapters: name -> newest committed version."""
        raw = await self.redis.hgetall(self.keys.weights)
        found = {text(name): version for name, version in raw.items()}
        return {name[8:]: whole(at, f"weights: {name}") for name, at in found.items() if name.startswith("adapter:")}

    async def newest(self) -> dict[str, int]:
        """Return name -> newest version that was ever announced, committed or not; the weights' name is ""."""
        newest = {"": 0}
        for key, version in (await self.redis.hgetall(self.keys.weights)).items():
            kind, colon, name = text(key).partition(":")
            if kind in ({"adapter", "highest"} if colon else {"committed", "highest"}):
                newest[name] = max(newest.get(name, 0), whole(version, f"weights: {text(key)}"))
        return newest

    async def version_state(self, version: int | str) -> str:
        """Return announced, committed, failed, given (by an operator's command), or "" if unknown."""
        return text(await self.redis.hget(self.keys.version(version), "st"))

    async def live_workers(self) -> set[str]:
        """Return the workers whose lease has not run out."""
        return await living_workers(self.redis, self.keys)


def _what(announcement: WeightAnnouncement) -> int | str:
    """Return the scripts' name of the version."""
    return f"{announcement.adapter}@{announcement.version}" if announcement.adapter else announcement.version


def heard(ring: Ring) -> WeightAnnouncement | None:
    """Return the announcement that a ring of the bell has, or None if it has none that can be read."""
    try:
        return decode(b64decode(ring.get("told", ""), validate=True), WeightAnnouncement)
    except (MessageError, binascii.Error, ValueError):
        return None


def read_report(value: bytes | str) -> TransferReport:
    """Return a worker's report, or one that says that it cannot be read."""
    try:
        return TransferReport.from_json(value.decode(errors="replace") if isinstance(value, bytes) else value)
    except MessageError as error:  # one bad report does not stop the others
        return TransferReport(ok=False, phase="load", error=str(error))


def holder_of(value: bytes) -> VersionHolder | None:
    try:
        return _HOLDER.validate_json(value, strict=True)
    except ValidationError:  # one bad entry does not stop the others
        return None


def _lost(value: bytes | None) -> dict[str, str]:
    try:
        return _LOST.validate_json(value) if value else {}
    except ValidationError:
        return {}
