"""The trainer's transfers: a new version to all workers, and the retained one to workers that join late."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from typing import Literal

from redis.asyncio import Redis
from redis.exceptions import RedisError

from ...messages.model import WeightAnnouncement
from ...messages.redis import Bell
from ..adapters import AdapterSender
from ..tensors import Snapshot
from ..transfer import (
    GLANCE_S,
    GRACE_S,
    Join,
    Ledger,
    Patience,
    SyncSettings,
    Transfer,
    TransferResult,
    nccl_settings,
    repeated,
)
from ..wire import Broadcaster, gpu_id
from .handle import Phase, PublishProgress

log = logging.getLogger(__name__)

__all__ = ["GRACE_S", "Sender", "TransferResult"]


class Sender:
    """Sends snapshots to a pool's workers. Retains the last committed one for workers that join later."""

    def __init__(self, redis: Redis, blocking: Redis, pool: str, host: str, settings: SyncSettings) -> None:
        """blocking: a connection for commands that wait. host: address under which workers reach this host."""
        self._settings = settings
        self._ledger = Ledger(redis, pool)
        self._bell = Bell(blocking, pool)
        self._line = Broadcaster(host, settings.port)
        self.adapters = AdapterSender(self._ledger, self._bell, settings, self._line)
        self._retained: Snapshot | None = None
        self._listening: asyncio.Task[None] | None = None
        self._not_by_ipc: set[str] = set()
        self._patience = Patience()
        self._under_way: Transfer | None = None
        self._stopped = ""

    async def open(self) -> dict[str, int]:
        """Start to listen to the bell. Returns name -> newest version, committed or not; the weights' name is ""."""
        await self._bell.open()
        self._listening = asyncio.create_task(self._bell.listen())
        newest = await self._ledger.newest()
        return await self._ledger.newest_adapters() | {"": newest}

    async def close(self) -> None:
        """Stop listening, and leave the process group."""
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.gather(self._listening, return_exceptions=True)
        await asyncio.to_thread(self._line.close)

    def poke(self) -> None:
        """Let `wait_for_work` look again. Call it on the sender's loop."""
        self._bell.ring_here()

    async def wait_for_work(self, ready: Callable[[], bool]) -> None:
        """Wait until `ready()` is true, which is checked after each `poke`, or a worker asks for a retained version."""
        while True:
            self._bell.quiet()
            if ready() or (self._retained is not None and await self._waiting()) or await self.adapters.lacking():
                return
            await self._bell.wait(float("inf"), GLANCE_S)

    async def _waiting(self) -> set[str]:
        """Return the live workers that ask for a transfer and have less than the retained version."""
        assert self._retained is not None
        try:
            behind = await self._ledger.behind(self._retained.manifest.version)
        except (RedisError, OSError):
            return set()
        return {worker for worker in behind if self._patience.lasts(worker)}

    async def catch_up(self) -> TransferResult | None:
        """Send the retained version to the workers that ask for it, or else a retained adapter.

        Returns None if nobody asks.
        """
        if self._retained is None or not (waiting := await self._waiting()):
            return await self.adapters.catch_up()
        self._stopped = ""
        result = await self._send(self._retained, frozenset(waiting))
        for worker in waiting:
            self._patience.tried(worker, well=worker in result.workers)
        return result

    async def send(self, snapshot: Snapshot) -> TransferResult:
        """Send a new version to every live worker. It is retained if it is committed."""
        self._stopped = ""
        self._patience.forget()
        result = await self._send(snapshot, None)
        if result.committed:
            self._retained = snapshot
        return result

    def stop(self, why: str) -> None:
        """End the `send` under way. Call it on the sender's loop."""
        self._stopped = why
        if self._under_way is not None:
            self._under_way.stop(why)

    def progress(self, total_bytes: int) -> PublishProgress:
        """Return how far the `send` under way is. Any thread may call it."""
        transfer = self._under_way
        if transfer is None:
            return PublishProgress("announced", 0, total_bytes)
        phase: Phase = "sending" if transfer.roster else "announced"
        return PublishProgress(phase, min(self._line.sent_bytes, total_bytes), total_bytes, transfer.roster)

    async def _send(self, snapshot: Snapshot, only: frozenset[str] | None) -> TransferResult:
        """Send to every live worker, or to `only` these. A transfer that one worker broke is repeated without it."""
        return await repeated(self._ledger, lambda whom: self._transfer(snapshot, whom), only)

    async def _transfer(self, snapshot: Snapshot, only: frozenset[str] | None) -> TransferResult:
        expected = await self._ledger.live_workers() if only is None else only
        if self._stopped:
            return TransferResult(committed=False, failures=dict.fromkeys(expected, self._stopped))
        source = _Retained(snapshot, self._line, self._settings.gpu_direct, self._not_by_ipc)
        self._under_way = transfer = Transfer(self._ledger, self._bell, self._settings, source)
        try:
            result = await transfer.run(expected, catch_up=only is not None)
        finally:
            self._under_way = None
        assert result is not None
        self._not_by_ipc |= source.handed_over & result.again
        return result


class _Retained:
    """A snapshot in this process, and the Broadcaster that sends it: a `TransferSource`."""

    def __init__(self, snapshot: Snapshot, line: Broadcaster, gpu_direct: bool, not_by_ipc: AbstractSet[str]) -> None:
        """not_by_ipc: workers to which handing over by CUDA IPC has failed before."""
        self.version, self.digest = snapshot.manifest.version, snapshot.manifest.fingerprint
        self.handed_over: set[str] = set()
        self._snapshot, self._line = snapshot, line
        self._gpu_direct, self._not_by_ipc = gpu_direct, not_by_ipc

    @property
    def absent(self) -> frozenset[int]:
        return self._line.absent

    @property
    def address(self) -> tuple[str, int]:
        return self._line.host, self._line.store.port

    async def announce(self, ledger: Ledger, announcement: WeightAnnouncement) -> bool:
        """See TransferSource. Returns True, because a trainer may always announce."""
        await asyncio.to_thread(self._line.offer, announcement.epoch, self._snapshot)
        await ledger.announce(announcement)
        return True

    def by_ipc(self, joins: Mapping[str, Join]) -> set[str]:
        here = gpu_id(self._snapshot.device) if self._gpu_direct else ""
        self.handed_over = {worker for worker, join in joins.items() if here and join.gpu == here} - self._not_by_ipc
        return set(self.handed_over)

    def backend(self, joins: Mapping[str, Join]) -> Literal["gloo", "nccl"]:
        bucket = self._snapshot.buckets[0]
        from_gpu = bucket.device.type == "cuda" or bucket.is_pinned()
        nccl = self._gpu_direct and from_gpu and all(join.cuda for join in joins.values())
        gpus = [join.gpu for join in joins.values() if join.gpu]
        if nccl and (len(set(gpus)) < len(gpus) or gpu_id(bucket.device) in gpus):
            log.warning("sent through host memory: NCCL takes one rank per GPU, and workers share one")
            nccl = False
        if nccl and (other := {join.nccl for join in joins.values()} - {nccl_settings()}):
            log.warning("sent through host memory: NCCL is set %r here, %s on workers", nccl_settings(), sorted(other))
            nccl = False
        return "nccl" if nccl else "gloo"

    def name_group(self, epoch: int, members: Mapping[str, int], joins: Mapping[str, Join]) -> str:
        return self._line.name_group(epoch, members, joins)

    async def send(self, announcement: WeightAnnouncement, timeout_s: float) -> None:
        await asyncio.to_thread(self._line.send, self._snapshot, announcement, timeout_s)

    def give_up(self, why: str) -> None:
        self._line.give_up(why)

    async def clean(self, announcement: WeightAnnouncement) -> None:
        await asyncio.to_thread(self._line.clean, announcement)
