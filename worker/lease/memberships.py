"""The leases of one worker in all shards of its pool. A shard that is lost costs the work of that shard alone."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from functools import partial

from redis.exceptions import NoPermissionError, RedisError

from ...messages.broker import Beat, Lease
from ...messages.errors import LeaseLost
from ...messages.model import WorkerStatus
from ...messages.redis import remind
from .heartbeat import Membership

log = logging.getLogger(__name__)
RETRY_S = 0.2


class Memberships:
    """Keeps the leases alive. In a pool with one shard the loss of the lease ends `run`, with LeaseLost.

    In a pool with several, `lost(lease)` is called: everything that is held under that lease has to be forgotten. Then
    this joins that shard again, under the same name: what others have taken over meanwhile has a higher attempt.
    back(): a shard is there again, and may have work.
    """

    def __init__(
        self, lease: Lease, beat_s: float, max_lost: int, lost: Callable[[Lease], None], back: Callable[[], None]
    ) -> None:
        self._home, self._lost, self._back = lease.parts[0], lost, back
        self._all = [Membership(part, beat_s, max_lost) for part in lease.parts]
        self._committed = 0

    async def join(self, status: WorkerStatus) -> None:
        """Register in all shards. Those that do not answer are joined later. Raises RedisError if none does."""
        answers = await asyncio.gather(*(one.join(status) for one in self._all), return_exceptions=True)
        failed = [answer for answer in answers if isinstance(answer, BaseException)]
        for membership, answer in zip(self._all, answers, strict=True):
            if isinstance(answer, BaseException):
                membership.lease.in_doubt = True
                if len(failed) == len(self._all) or not isinstance(answer, RedisError | OSError):
                    raise answer

    async def run(self, status: Callable[[], WorkerStatus], on_beat: Callable[[Lease, Beat], Awaitable[None]]) -> None:
        """Beat until cancelled. Raises LeaseLost in a pool with one shard."""
        if len(self._all) == 1:
            await self._all[0].run(status, partial(on_beat, self._home))
            return
        async with asyncio.TaskGroup() as tasks:
            for membership in self._all:
                tasks.create_task(self._keep(membership, status, on_beat))

    async def _keep(
        self,
        membership: Membership,
        status: Callable[[], WorkerStatus],
        on_beat: Callable[[Lease, Beat], Awaitable[None]],
    ) -> None:
        lease = membership.lease
        while True:
            if membership.joined:
                try:
                    await membership.run(status, partial(self._heard, lease, on_beat))
                except LeaseLost as error:
                    log.warning("shard %d is lost for now: %s", lease.keys.shard, error)
                    lease.in_doubt, membership.joined = True, False
                    self._lost(lease)
            try:
                if pool_id := getattr(self._home.redis, "pool_id", ""):
                    with contextlib.suppress(NoPermissionError):  # then others, or an operator, tell it
                        await remind(lease.redis, lease.keys, len(self._all), pool_id)
                await membership.join(status())
                log.info("joined shard %d again", lease.keys.shard)
            except (RedisError, OSError):
                await asyncio.sleep(RETRY_S)

    async def _heard(self, lease: Lease, on_beat: Callable[[Lease, Beat], Awaitable[None]], beat: Beat) -> None:
        if lease.in_doubt:
            lease.in_doubt = False
            self._back()
        if lease is self._home:
            self._committed = beat.committed
        elif beat.committed < self._committed:  # nobody has told this shard of it, or it has lost it
            await lease.learn(self._committed, {})
        await on_beat(lease, beat)
