"""Versions of a reproducible run: sent until a worker has them, and computed again by a trainer that was killed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from redis.exceptions import RedisError

from ...messages.errors import WeightSyncError
from ..tensors import Snapshot
from ..transfer import Ledger
from .handle import PublishReport

log = logging.getLogger(__name__)
Send = Callable[[], Awaitable[PublishReport]]
ATTEMPTS = 5
"""Most transfers of a version that no worker could take."""
PAUSE_S = 0.5


async def is_known(ledger: Ledger, snapshot: Snapshot) -> tuple[bool, bool]:
    """Whether the pool has had a version with these very tensors, and whether it is its committed one.

    Raises WeightSyncError if the number was given to other tensors: then this run is not the one that gave it.
    """
    version, mine = snapshot.manifest.version, snapshot.manifest.fingerprint
    committed, digest, _ = await ledger.heading()
    if version != committed:
        digest = await ledger.digest_of(version)
    if digest and digest != mine:
        raise WeightSyncError("the pool has other weights under this number: this trainer does not repeat their run")
    if not digest and version <= committed:
        raise WeightSyncError(f"the pool has version {committed}, and does not know what this one was")
    return bool(digest), version == committed


async def insist(
    send: Callable[[], Awaitable[PublishReport]], name: str, given_up: Callable[[], bool]
) -> PublishReport:
    """Send a version again while Redis is away, and ATTEMPTS times if no worker could take it: the jobs that wait want
    this version and no other."""
    attempt = 1
    while True:
        try:
            report = await send()
            if report.state != "failed" or given_up() or attempt == ATTEMPTS:
                return report
            attempt += 1
            log.warning("%s: no worker has it (%s); once more", name, report.failures)
        except (RedisError, OSError) as error:
            if given_up():
                raise
            log.warning("%s: %s; once more", name, error)
        await asyncio.sleep(PAUSE_S)
