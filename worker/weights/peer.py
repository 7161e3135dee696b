"""A worker that serves the newest version sends it to workers that are behind, when no trainer does.

A pool with a live trainer does not need it, because a trainer answers at once and a peer waits first. Of all peers that
could help only one does: the one whose announcement the ledger accepts (see `offer.lua`). The open transfer is the
lock, and it ends with its worker's lease. If a trainer comes back, its announcement replaces the peer's. If a newer
version comes, the peer first ends its send and then takes part: an engine never loads while it sends.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any, Literal

from redis.exceptions import RedisError

from ...messages.errors import EngineError, RolloutMQError, TransferTimeout
from ...messages.model import WeightAnnouncement
from ...messages.redis import Bell, first_node_url
from ...sync.transfer import GRACE_S, Join, Ledger, SyncSettings, Transfer, TransferOrder, TransferResult, nccl_settings
from ..config import WorkerConfig
from ..engine import Engine
from ..gate import set_within
from .follower import WeightFollower

log = logging.getLogger(__name__)
JOIN_S = 5.0
TRANSFER_S = 120.0
LOOK_S = 1.0
ASKED_ANEW_S = 60.0
"""Seconds between looks at the ledger while nobody asks. A worker that waits repeats its question."""
AGAIN_S = 5.0
LONGEST_S = 300.0
GIVE_WAY_S = 5.0
ENGINE_GRACE_S = 10.0


class Peer:
    """Sends weights to workers that nobody else helps. One for each incarnation of a worker.

    follower: knows which version the engine has verified and may send now.
    """

    def __init__(
        self, engine: Engine, ledger: Ledger, bell: Bell, config: WorkerConfig, follower: WeightFollower
    ) -> None:
        self._engine, self._ledger, self._bell, self._follower = engine, ledger, bell, follower
        self._redis_url, self._after_s = config.redis_url, config.peer_after_s
        self._poked = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._transfer: Transfer | None = None
        self._last: _Lender | None = None
        self._since: float | None = None
        self._watched = 0, 0.0
        self._failures, self._not_before = 0, 0.0

    def poke(self) -> None:
        """Look now, because a worker asks for weights."""
        self._poked.set()

    async def give_way(self, why: str) -> bool:
        """End a send under way. Returns False if it did not end within GIVE_WAY_S."""
        if self._transfer is not None:
            log.info("a transfer to other workers is given up: %s", why)
            self._transfer.give_up(why)
        return await set_within(self._idle, GIVE_WAY_S)

    async def run(self, worker_id: str) -> None:
        """Run until cancelled. Returns at once if this worker cannot help or is configured not to."""
        self._follower.give_way = self.give_way
        if self._after_s is None:
            return
        if self._engine.info.tp_size > 1:
            log.info("this engine is tensor-parallel: other workers cannot catch up from it")
            return
        while True:
            self._poked.clear()
            wait_s = LOOK_S
            try:
                wait_s = await self._look(worker_id, self._after_s)
            except (RedisError, OSError, RolloutMQError) as error:
                self._since = None
                log.warning("waiting workers could not be looked after: %s", error)
            await set_within(self._poked, wait_s)

    async def _look(self, worker_id: str, after_s: float) -> float:
        """Help if workers have waited `after_s` for a sender. Returns the seconds until the next look."""
        version, ledger = self._follower.lendable, self._ledger
        behind = await ledger.behind(version) - {worker_id} if version else set()
        if not behind or version != await ledger.committed():
            self._since = None
            return LOOK_S if behind else ASKED_ANEW_S
        now, number = time.monotonic(), await ledger.open_epoch()
        if number and not await self._is_over(number, now):
            self._since = None
            return LOOK_S
        if self._since is None:
            self._since = now
        if (wait_s := max(self._since + after_s, self._not_before) - now) > 0:
            return wait_s
        self._since = None
        if self._follower.lendable == version:
            await self._help(worker_id, version, frozenset(behind), over=number)
        return LOOK_S

    async def _is_over(self, number: int, now: float) -> bool:
        """Whether the open transfer's sender has died: its lease is gone, or its deadline has passed."""
        epoch = await self._ledger.epoch(number)
        if epoch is None:
            return True
        if epoch.by:
            return epoch.by not in await self._ledger.live_workers()
        if self._watched[0] != number:
            self._watched = number, now
        return now - self._watched[1] > epoch.announcement.join_timeout_s + epoch.announcement.deadline_s + 3 * GRACE_S

    async def _help(self, worker_id: str, version: int, behind: frozenset[str], over: int) -> None:
        self._idle.clear()
        source = _Lender(self._engine, version, worker_id, over)
        settings = SyncSettings(join_timeout_s=JOIN_S, transfer_timeout_s=TRANSFER_S, nonfinite="allow")
        self._transfer = transfer = Transfer(self._ledger, self._bell, settings, source)
        try:
            await source.open(self._redis_url)
            result = await transfer.run(behind, catch_up=True)
        finally:
            self._transfer = None
            source.give_up("the sender leaves")
            self._last = source  # its store stays until the next transfer: the engine has yet to read that this is over
            self._idle.set()
        if result is not None:
            await self._learn(version, result)

    async def _learn(self, version: int, result: TransferResult) -> None:
        """After a failure wait longer each time, because another worker may succeed."""
        if result.workers:
            log.info("version %s: %s caught up from this worker", version, ", ".join(result.workers))
            self._failures = 0
        elif result.failures.keys() & await self._ledger.live_workers():  # those that died are nobody's fault
            self._not_before = time.monotonic() + min(LONGEST_S, AGAIN_S * 2**self._failures)
            self._failures += 1


class _Lender:
    """The engine's version, and a rendezvous store in this process: a `TransferSource`."""

    def __init__(self, engine: Engine, version: int, worker_id: str, over: int) -> None:
        self.version, self.digest = version, ""
        self.absent: frozenset[int] = frozenset()
        self._engine, self._worker_id, self._over = engine, worker_id, over
        self._host, self._said = "", False
        self._store: Any = None
        self._keys: Any = None

    async def open(self, redis_url: str) -> None:
        """Start to listen. Raises RedisUnavailable if no address of this host leads to the pool."""

        def make() -> None:
            from ...sync.wire import own_address_towards, serve_store  # noqa: PLC0415 – torch

            self._host = own_address_towards(first_node_url(redis_url))
            self._store = serve_store(self._host)

        await asyncio.to_thread(make)

    @property
    def address(self) -> tuple[str, int]:
        """See TransferSource."""
        return self._host, self._store.port

    async def announce(self, ledger: Ledger, announcement: WeightAnnouncement) -> bool:
        """See TransferSource. The engine puts the manifest there when it sends."""
        from ...sync.wire import EpochKeys  # noqa: PLC0415 – torch

        self._keys = EpochKeys(announcement.epoch)
        answer = await ledger.offer(announcement, self._worker_id, self._over)
        if answer != "ok":
            log.info("version %s is not sent to others: %s", self.version, answer)
        return answer == "ok"

    def by_ipc(self, joins: Mapping[str, Join]) -> set[str]:
        """See TransferSource. Returns none: an engine's buffers are not handed over."""
        return set()

    def backend(self, joins: Mapping[str, Join]) -> Literal["gloo", "nccl"]:
        """See TransferSource. An NCCL group may have each GPU only once."""
        here = self._engine.info
        apart = all(
            join.cuda and (join.gpu == "" or join.gpu != here.gpu) and join.nccl == nccl_settings()
            for join in joins.values()
        )
        return "nccl" if here.device == "cuda" and apart else "gloo"

    def name_group(self, epoch: int, members: Mapping[str, int], joins: Mapping[str, Join]) -> str:
        """See TransferSource. Each transfer has a new group."""
        return f"peers-{epoch}"

    async def send(self, announcement: WeightAnnouncement, timeout_s: float) -> None:
        """See TransferSource."""
        order = TransferOrder.of_announcement(announcement, 0, timeout_s=timeout_s)
        try:
            async with asyncio.timeout(timeout_s + ENGINE_GRACE_S):
                report = await self._engine.send_weights(order)
        except (EngineError, TimeoutError) as error:
            why = f"{type(error).__name__}: {error}"
        else:
            why = "" if report.ok else report.error
        if why:
            self.give_up(why)
            raise TransferTimeout(why)

    def give_up(self, why: str) -> None:
        """See TransferSource. The engine and the receivers look at this key."""
        if self._store is not None and self._keys is not None and not self._said:
            self._said = True  # the first reason is the true one
            self._tell(self._keys.broken, why[:500])

    async def clean(self, announcement: WeightAnnouncement) -> None:
        """See TransferSource. It tells the engine that it may leave the group."""
        self._said = True
        self._tell(self._keys.over, "1")

    def _tell(self, key: str, value: str) -> None:
        try:
            self._store.set(key, value)
        except RuntimeError as error:  # torch's; engine and receivers go by their own deadlines
            log.warning("the transfer of version %s: its store does not answer: %s", self.version, error)
