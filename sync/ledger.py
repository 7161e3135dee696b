"""The ledger of weights versions and transfers in Redis: announced, then committed or failed.

A transfer is an epoch: joining -> sealed -> closed. Membership is settled at the seal, before anything is sent; a
worker that is not in the sealed roster has no part in it and asks for a later one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from redis.asyncio import Redis

from ..messages.codec import decode, encode
from ..messages.errors import MessageError
from ..messages.keys import Keys
from ..messages.lua import Scripts
from ..messages.weights import WeightAnnouncement
from .transfer import TransferReport

REMEMBER_S = 7 * 86400
"""How long versions and epochs stay in the ledger."""

EpochState = Literal["joining", "sealed", "closed"]


@dataclass(frozen=True, slots=True)
class Epoch:
    """A transfer as the ledger has it. joins: worker -> engine ranks; reports: worker -> how it went there."""

    state: EpochState
    announcement: WeightAnnouncement
    joins: dict[str, int]
    reports: dict[str, TransferReport]


class Ledger:
    """Reads and writes of one pool's ledger; every write is one idempotent script."""

    def __init__(self, redis: Redis, pool: str) -> None:
        # redis-py types a reply as the union of what every mode and protocol could give; ours are RESP2 and bytes.
        self.redis: Any = redis
        self.keys = Keys(pool)
        self._scripts = Scripts(redis, self.keys)

    async def committed(self) -> int:
        """Newest committed version; 0 before the first, which is the model as workers load it from disk."""
        return int(await self.redis.hget(self.keys.weights, "committed") or 0)

    async def open_epoch(self) -> int:
        """Number of the transfer under way, 0 for none."""
        return int(await self.redis.hget(self.keys.weights, "open") or 0)

    async def new_epoch(self) -> int:
        """A number no other transfer of this pool has. A re-sent increment only skips one."""
        return int(await self.redis.hincrby(self.keys.weights, "epochs", 1))

    async def epoch(self, number: int) -> Epoch | None:
        """The transfer, or None if it is not remembered."""
        raw = await self.redis.hgetall(self.keys.epoch(number))
        if b"m" not in raw:
            return None
        fields: dict[str, Any] = {name.decode(): value for name, value in raw.items()}
        return Epoch(
            state=fields["st"].decode(),
            announcement=decode(fields["m"], WeightAnnouncement),
            joins={name[5:]: int(value) for name, value in fields.items() if name.startswith("join:")},
            reports={name[7:]: _report(value) for name, value in fields.items() if name.startswith("report:")},
        )

    async def announce(self, announcement: WeightAnnouncement) -> None:
        """Open the transfer for joins and ring the bell."""
        message = encode(announcement)
        await self._scripts.run("announce", announcement.epoch, announcement.version, message, REMEMBER_S)

    async def join(self, epoch: int, worker_id: str, ranks: int) -> bool:
        """Take part with `ranks` engine processes. False if it is too late or the worker holds no lease."""
        answer: bytes = await self._scripts.run("join", epoch, worker_id, ranks)
        return answer == b"ok"

    async def seal(self, announcement: WeightAnnouncement) -> None:
        """Close the transfer for joins; `announcement` now carries roster and world size."""
        await self._scripts.run("seal", announcement.epoch, encode(announcement))

    async def report(self, epoch: int, worker_id: str, report: TransferReport) -> None:
        """How the transfer ended on a worker; success also takes it off the list of those that wait for one."""
        await self._scripts.run("report", epoch, worker_id, report.to_json(), int(report.ok))

    async def close(self, announcement: WeightAnnouncement, committed: bool) -> None:
        """End the transfer; a committed version becomes the pool's newest if it is."""
        state = "committed" if committed else "failed"
        await self._scripts.run("close", announcement.epoch, announcement.version, state, REMEMBER_S)

    async def version_state(self, version: int) -> str:
        """announced, committed, failed, or "" for a version the ledger does not know."""
        state = await self.redis.hget(self.keys.version(version), "st")
        return state.decode() if state else ""

    async def want(self, worker_id: str, version: int) -> None:
        """Ask for a transfer: this worker has only `version`."""
        await self._scripts.run("want", worker_id, version)

    async def wanted(self) -> dict[str, int]:
        """Workers that wait for a transfer, and the version each has."""
        raw = await self.redis.hgetall(self.keys.wanted)
        return {worker.decode(): int(version) for worker, version in raw.items()}

    async def live_workers(self) -> set[str]:
        """Workers whose lease has not run out, by Redis' clock."""
        seconds, micros = await self.redis.time()
        now = seconds * 1000 + micros // 1000
        return {worker.decode() for worker in await self.redis.zrangebyscore(self.keys.workers, now, "+inf")}


def _report(value: bytes) -> TransferReport:
    try:
        return TransferReport.from_json(value.decode(errors="replace"))
    except MessageError as error:  # one strange worker does not stop the others
        return TransferReport(ok=False, phase="load", error=str(error))
