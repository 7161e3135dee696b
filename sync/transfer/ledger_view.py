"""What the ledger remembers of versions and transfers, for people: nothing here decides anything."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

from ...messages.errors import InvalidField, MessageError, WeightSyncError
from .ledger import Epoch, Ledger

FARTHEST = 10_000
"""Transfers that are looked back at."""
PAGE = 64


@dataclass(frozen=True, slots=True)
class TransferRecord:
    """One epoch of a version."""

    number: int
    epoch: Epoch

    @property
    def served(self) -> list[str]:
        """Workers on which it succeeded."""
        return sorted(worker for worker, report in self.epoch.reports.items() if report.ok)

    @property
    def failures(self) -> dict[str, str]:
        """Worker -> why not: what it reported, or that it has not until the transfer was closed."""
        found = {w: f"{r.phase}: {r.error}" for w, r in self.epoch.reports.items() if not r.ok}
        if self.epoch.state == "closed":
            silent = self.epoch.announcement.roster.keys() - self.epoch.reports.keys()
            found |= dict.fromkeys(silent, "no report")
        return dict(sorted(found.items()))


@dataclass(frozen=True, slots=True)
class VersionRecord:
    """A version and its transfers, newest first.

    state: announced, committed, failed, given (by an operator's command), or "" if only its transfers are remembered.
    announced_at, ended_at: Unix seconds by Redis' clock, None where that is not known.
    """

    version: int
    state: str
    announced_at: float | None
    ended_at: float | None
    transfers: tuple[TransferRecord, ...]


class LedgerView:
    """Reads, one at a time; what is announced meanwhile may be missing. What cannot be read is left out."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    async def versions(self, limit: int = 20) -> list[VersionRecord]:
        """The newest `limit` ones, newest first."""
        found: dict[int, list[TransferRecord]] = {}
        async for transfer in self._transfers():
            version = transfer.epoch.announcement.version
            if version not in found and len(found) == limit:
                break
            found.setdefault(version, []).append(transfer)
        return [await self._record(version, found[version]) for version in sorted(found, reverse=True)]

    async def version(self, version: int) -> VersionRecord:
        """One version. Raises WeightSyncError if the ledger does not know it, InvalidField if it cannot be one."""
        if version < 1:
            raise InvalidField("version", version, "at least 1; 0 is the model as workers load it from disk")
        if not await self._ledger.version_state(version):
            raise WeightSyncError(f"the ledger knows no version {version}: never announced, or more than a week ago")
        found: list[TransferRecord] = []
        others = 0  # since its last transfer: one version's are close together
        async for transfer in self._transfers():
            others += 1
            if transfer.epoch.announcement.version == version:
                found.append(transfer)
                others = 0
            if found and others >= PAGE:
                break
        return await self._record(version, found)

    async def _transfers(self) -> AsyncIterator[TransferRecord]:
        """Newest first, until a page of numbers has none: older ones are forgotten."""
        newest = int(await self._ledger.redis.hget(self._ledger.keys.weights, "epochs") or 0)
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
            state=raw.get(b"st", b"").decode(),
            announced_at=_seconds(raw.get(b"at")),
            ended_at=_seconds(raw.get(b"closed")),
            transfers=tuple(transfers),
        )


def _seconds(millis: bytes | None) -> float | None:
    return int(millis) / 1000 if millis else None
