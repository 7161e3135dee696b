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
    """Claims jobs for one worker: its share of what waits, and more of it if others leave theirs.

    room(): how many more samples the worker can hold; 0 while it must not claim. serves(): the weights version that it
    serves, and the newest version that it has of each LoRA adapter. holds(part): samples that it has admitted under the
    lease in one shard, and not published. pace(): see Lease.pace.
    """

    def __init__(
        self,
        room: Callable[[], int],
        serves: Callable[[], tuple[int, Mapping[str, int]]],
        *,
        holds: Callable[[Lease], int],
        pace: Callable[[], float],
    ) -> None:
        self._room, self._serves = room, serves
        self._holds, self._pace = holds, pace
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

    def slow(self, part: Lease | None = None) -> int:
        """Samples of the jobs that are `aside`, in one shard or in all."""
        return sum(one.n - len(one.published) for one in self.aside if part is None or part.has(one.job_id))

    def _all_of(self, part: Lease) -> int:
        return self._holds(part) + self.slow(part)

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

    async def run(self, lease: Lease, waker: Redis, admit: Callable[[list[Claim]], Awaitable[None]]) -> None:
        """Claim until cancelled. admit(claims): takes the claimed jobs. Raises LeaseLost."""
        for part in lease.parts:
            part.holds, part.pace = partial(self._all_of, part), self._pace
        wakers = list(zip(getattr(waker, "shards", ()) or (waker,), lease.parts, strict=True))
        wakes: dict[int, asyncio.Task[None]] = {}
        takes = False  # what the pool knows: whether this worker takes something
        try:
            while True:
                self._changed.clear()
                room = max(0, self._room())
                if room or takes or any(wake.done() for wake in wakes.values()):
                    wakes = {shard: wake for shard, wake in wakes.items() if not wake.done()}
                    try:
                        async with self._taking:
                            claims = await lease.claim(min(room, MAX_JOBS), room, *self._serves())
                            if claims:
                                await admit(claims)
                    except (RedisError, OSError) as error:
                        log.warning("claim failed: %s", error)
                        await asyncio.sleep(RETRY_S)
                        continue
                    takes = room > 0
                    if claims and not lease.again_s:
                        continue
                # Not cancelled while it waits: that would cost the connection, and maybe the token.
                for shard, (its, part) in enumerate(wakers):
                    if room and shard not in wakes and not part.has_share:
                        wakes[shard] = asyncio.create_task(self._wake(its, lease, part))
                await self._until_changed(wakes, lease.again_s if room else 0.0)
        finally:
            for task in (*wakes.values(), *(task for _, task in self._aside.values())):
                task.cancel()
            self._aside.clear()

    async def _until_changed(self, wakes: Mapping[int, asyncio.Task[None]], again_s: float) -> None:
        """Until something may be there: after a change here, a token of the pool, or `again_s`, 0 for never."""
        changed = asyncio.create_task(self._changed.wait())
        try:
            await asyncio.wait({*wakes.values(), changed}, timeout=again_s or None, return_when=asyncio.FIRST_COMPLETED)
        finally:
            changed.cancel()

    async def _wake(self, waker: Any, lease: Lease, part: Lease) -> None:
        try:
            kin = [part.keys.token(kin_of(part.can))] if part.can else []
            if await waker.blpop([part.keys.token(part.worker_id), *kin, part.keys.wake], timeout=WAKE_S):
                lease.begin_with(part)
        except (RedisError, OSError):
            await asyncio.sleep(RETRY_S)
