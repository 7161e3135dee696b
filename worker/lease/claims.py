"""Claims jobs whenever there is room, and waits on the pool's wake-up token when there are none."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from ...messages.broker import Claim, Lease, kin_of

log = logging.getLogger(__name__)
MAX_JOBS = 128
WAKE_S = 20
"""So often an idle worker looks for itself. If a wake-up token is lost with its taker, the next reap puts it back."""
RETRY_S = 0.2


class ClaimLoop:
    """Claims jobs for one incarnation of a worker.

    room(): how many more samples the worker can hold; 0 while it must not claim. serves(): the weights version that it
    serves, and the newest version that it has of each LoRA adapter. admit(claims): takes the claimed jobs.
    """

    def __init__(
        self,
        lease: Lease,
        waker: Redis,
        room: Callable[[], int],
        serves: Callable[[], tuple[int, Mapping[str, int]]],
        admit: Callable[[list[Claim]], Awaitable[None]],
    ) -> None:
        self._lease = lease
        self._room, self._serves, self._admit = room, serves, admit
        wakers = getattr(waker, "shards", ()) or (waker,)
        self._wakers: list[tuple[Any, Lease]] = list(zip(wakers, lease.parts, strict=True))
        self._changed = asyncio.Event()
        self._taking = asyncio.Lock()
        self._aside: dict[str, tuple[Claim, asyncio.Task[None]]] = {}

    def poke(self) -> None:
        """There may be room, or different weights, now."""
        self._changed.set()

    @property
    def under_way(self) -> bool:
        """Whether a claim may have given jobs that are neither admitted nor `aside` yet."""
        return self._taking.locked()

    @property
    def aside(self) -> list[Claim]:
        """Claimed jobs whose admission takes its time beside further claims."""
        return [claim for claim, _ in self._aside.values()]

    def admit_aside(self, claim: Claim, admission: Coroutine[Any, Any, None]) -> None:
        """Run a job's slow admission beside further claims. It has ended when the job is not `aside` any more."""
        self.drop(claim.job_id)  # of an earlier claim, which a failover of Redis has lost
        task = asyncio.create_task(admission)
        self._aside[claim.job_id] = claim, task
        task.add_done_callback(partial(self._admitted, claim.job_id))

    def _admitted(self, job_id: str, task: asyncio.Task[None]) -> None:
        if self._aside.get(job_id, (None, None))[1] is task:
            del self._aside[job_id]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("job %s could not be admitted; it is given back", job_id, exc_info=error)
        self.poke()

    def drop(self, job_id: str) -> None:
        """Do not admit a job that is `aside`: it is not wanted any more."""
        if job_id in self._aside:
            self._aside.pop(job_id)[1].cancel()

    async def settled(self, *, slow: bool = True) -> None:
        """Return when all claimed jobs are admitted; those that are `aside` only count if `slow`.

        While `room` is 0 no other claim follows.
        """
        async with self._taking:
            pass
        if slow and self._aside:
            await asyncio.wait([task for _, task in self._aside.values()])

    async def run(self) -> None:
        """Claim until cancelled. Raises LeaseLost."""
        wakes: dict[int, asyncio.Task[None]] = {}
        changed: asyncio.Task[object] | None = None
        try:
            while True:
                self._changed.clear()
                room = self._room()
                if room <= 0:
                    await self._changed.wait()
                    continue
                try:
                    async with self._taking:
                        claims = await self._lease.claim(min(room, MAX_JOBS), room, *self._serves())
                        if claims:
                            await self._admit(claims)
                except (RedisError, OSError) as error:
                    log.warning("claim failed: %s", error)
                    await asyncio.sleep(RETRY_S)
                    continue
                if claims:
                    continue
                # Not cancelled while it waits: that would cost the connection, and maybe the token.
                for shard, (waker, part) in enumerate(self._wakers):
                    if shard not in wakes:
                        wakes[shard] = asyncio.create_task(self._wake(waker, part))
                changed = asyncio.create_task(self._changed.wait())
                await asyncio.wait({*wakes.values(), changed}, return_when=asyncio.FIRST_COMPLETED)
                changed.cancel()
                wakes = {shard: wake for shard, wake in wakes.items() if not wake.done()}
        finally:
            for task in (*wakes.values(), changed, *(task for _, task in self._aside.values())):
                if task is not None:
                    task.cancel()

    async def _wake(self, waker: Any, part: Lease) -> None:
        try:
            kin = [part.keys.token(kin_of(part.can))] if part.can else []
            if await waker.blpop([part.keys.token(part.worker_id), *kin, part.keys.wake], timeout=WAKE_S):
                self._lease.begin_with(part)
        except (RedisError, OSError):
            await asyncio.sleep(RETRY_S)
