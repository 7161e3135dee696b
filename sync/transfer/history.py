"""The ledger for people: versions and their transfers, newest first. Nothing here decides anything.

It reads one record after the other, so what is announced meanwhile may be missing. Records that cannot be read are left
out.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

from ...messages.errors import InvalidField, MessageError, WeightSyncError
from ...messages.redis import text, whole
from .ledger import Epoch, Ledger

FARTHEST = 10_000
"""Most transfers that are read, newest first."""
PAGE = 64


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
    transfers: tuple[Epoch, ...]


async def newest_versions(ledger: Ledger, limit: int = 20) -> list[VersionRecord]:
    """Return the newest `limit` versions, newest first."""
    found: dict[int, list[Epoch]] = {}
    async for transfer in _transfers(ledger):
        version = transfer.announcement.version
        if version not in found and len(found) == limit:
            break
        found.setdefault(version, []).append(transfer)
    return [await _record(ledger, version, found[version]) for version in sorted(found, reverse=True)]


async def one_version(ledger: Ledger, version: int) -> VersionRecord:
    """Return one version.

    Raises WeightSyncError if the ledger does not have it, InvalidField for a number below 1.
    """
    if version < 1:
        raise InvalidField("version", version, "at least 1; 0 is the model as workers load it from disk")
    if not await ledger.version_state(version):
        raise WeightSyncError(f"the ledger knows no version {version}: never announced, or more than a week ago")
    found: list[Epoch] = []
    others = 0  # transfers of others since its last one: those of one version are close together
    async for transfer in _transfers(ledger):
        others += 1
        if transfer.announcement.version == version:
            found.append(transfer)
            others = 0
        if found and others >= PAGE:
            break
    return await _record(ledger, version, found)


async def _transfers(ledger: Ledger) -> AsyncIterator[Epoch]:
    """Yield transfers, newest first, until a page of numbers has none. Older ones have expired."""
    newest = whole(await ledger.redis.hget(ledger.keys.weights, "epochs"))
    missing = 0
    for number in range(newest, max(0, newest - FARTHEST), -1):
        try:
            epoch = await ledger.epoch(number)
        except MessageError:  # written by another major version
            epoch = None
        if epoch is not None:
            missing = 0
            if not epoch.announcement.adapter:
                yield epoch
        elif (missing := missing + 1) >= PAGE:
            return


async def _record(ledger: Ledger, version: int, transfers: list[Epoch]) -> VersionRecord:
    raw = await ledger.redis.hgetall(ledger.keys.version(version))
    return VersionRecord(
        version=version,
        state=text(raw.get(b"st")),
        announced_at=_seconds(raw.get(b"at")),
        ended_at=_seconds(raw.get(b"closed")),
        transfers=tuple(transfers),
    )


def _seconds(millis: bytes | None) -> float | None:
    return whole(millis) / 1000 if millis else None
