"""One case of `benchmarks/spread` on a real broker.

Real are Redis, the scripts, leases, claims, wake-up tokens (a connection for each worker), moves, results and their
client. Engines are simulated, and one listener hears the pool's bell for all workers.
"""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections import Counter
from dataclasses import asdict
from typing import Any

from rolloutmq.messages.broker import Claim, Finished, Lease, can_of
from rolloutmq.messages.codec import decode
from rolloutmq.messages.model import GenerateJob, Partial, RolloutResult, Segment, WorkerStatus
from rolloutmq.messages.redis import Bell, Keys, connect
from rolloutmq.ops.redis import EmbeddedRedis
from rolloutmq.worker.generation import Generation
from rolloutmq.worker.jobs import HeldJob, HeldJobs, Run, SampleRun
from rolloutmq.worker.lease import ClaimLoop, Handback, Membership, Outbox
from rolloutmq.worker.moving import Moving

from ..parts import Part, busy_s
from .client import POOL, drive, jobs_of
from .engine import INFO, LOGPROBS, TOKENS, Clock, SimulatedEngine
from .load import PROMPT, ROOM, Case, Change, Lost, changes

LEASE_S, BEAT_S = 600.0, 0.2
"""Heartbeats are few: one of all workers in so many seconds. They move the pool's clock."""
SHORT_LEASE_S, SHORT_BEAT_S = 2.0, 0.5
"""Where workers die, each sends its own."""
MAX_LOST = 100
"""A worker's death is no fault of its jobs here: none runs alone because it died twice."""


class CountedLease(Lease):
    """Counts claims, those that gave something, and their jobs."""

    counts: Counter[str]

    async def claim(self, *args: Any, **more: Any) -> list[Claim]:
        claims = await super().claim(*args, **more)
        self.counts["claims"] += 1
        self.counts["giving"] += bool(claims)
        self.counts["given"] += len(claims)
        return claims


class Worker:
    """A worker's real parts around a simulated engine."""

    def __init__(self, pool: Pool, number: int) -> None:
        self.pool, self.id = pool, f"w{number:04d}"
        self.held = HeldJobs(self._dropped)
        self.outbox = Outbox(self._published, self._failed)
        self.engine = SimulatedEngine(pool.clock, pool.case, pool.lengths)
        hears = {"on_finished": self._finished, "on_refused": self._failed, "on_failed": self._failed}
        self.generation = Generation(self.engine, ROOM, **hears, on_dead=lambda: self._failed(self, "dead"))
        self.lease = CountedLease(pool.redis, POOL, self.id, pool.lease_s)
        self.lease.counts = pool.counts
        self.lease.can = can_of(INFO.context_length, INFO.features, True)
        shares = {"holds": lambda _: self.held.unpublished, "pace": lambda: self.generation.pace}
        self.claims = ClaimLoop(self._room, lambda: (0, {}), **shares)
        self.membership = Membership(self.lease, SHORT_BEAT_S, MAX_LOST)
        self.leaving = False
        self._tasks: list[asyncio.Task[None]] = []
        self.handback = Handback(self.held, MAX_LOST, "simulated", lambda: self.lease)
        self.moving = Moving(self.engine, self.generation, self.held, self.handback)

    async def join(self) -> None:
        await self.membership.join(self.status())
        claims = self.claims.run(self.lease, self.pool.waker, self._admit)
        loops = [claims, self.outbox.run(self.lease), self.moving.run()]
        if self.pool.case.churn:
            loops.append(self.membership.run(self.status, self._on_beat))
        self._tasks = [self.pool.watch(loop) for loop in loops]

    def die(self) -> list[tuple[int, int, int]]:
        """Returns what it had: job, sample, tokens that the pool has of it."""
        self._end()
        self.engine.stop()
        kept = [(held, index, held.claim.partials.get(index, ())) for held in self.held for index in held.samples]
        tokens = [sum(len(decode(piece, Partial).token_ids) for piece in pieces) for *_, pieces in kept]
        return [(int(held.id, 16), index, count) for (held, index, _), count in zip(kept, tokens, strict=True)]

    async def leave(self) -> None:
        """Give back what it holds, with what there is of it."""
        self.leaving = True
        await self.claims.settled()
        async with self.generation.in_flight.quiet():
            await self.outbox.flushed()
            await self.handback.release(self.lease, list(self.held))
        self._end()
        await self.lease.leave()

    def _end(self) -> None:
        for task in self._tasks:
            task.cancel()

    def status(self) -> WorkerStatus:
        return WorkerStatus(worker_id=self.id, host="simulated", pid=1, state="serving", version=0)

    async def _on_beat(self, _: object) -> None:
        """Of a heartbeat's answer nothing is needed."""

    def _room(self) -> int:
        return 0 if self.leaving else ROOM - self.held.unpublished

    async def _admit(self, claims: list[Claim]) -> None:
        for claim in claims:
            job = self.pool.jobs[claim.job_id]  # not decoded again: one process stands for all workers
            held = HeldJob(claim, job)
            for index in set(range(claim.n)) - claim.published:
                sample = SampleRun(job, TOKENS[:PROMPT], index, claim.attempt, claim.queued_s)
                sample.resume_from([decode(piece, Partial) for piece in claim.partials.get(index, ())])
                held.samples[index] = sample
            self.held.add(held)
            self.generation.add(held.samples.values())
            self.pool.admitted(claim)

    def _finished(self, sample: Run) -> None:
        if self.held.get(sample.job.id, sample.attempt) is None:
            return
        result = RolloutResult(
            job_id=sample.job.id,
            sample=sample.index,
            n=sample.job.n,
            group_id=sample.job.id,
            token_ids=TOKENS[:1],
            logprobs=LOGPROBS[:1],
            finish_reason="stop",
            segments=(Segment(0, 1),),
            worker_id=self.id,
            attempt=sample.attempt,
        )
        self.outbox.put(Finished(sample.job.id, sample.attempt, sample.index, result))

    def _published(self, finished: Finished, state: str) -> None:
        if state == "fenced":
            self.held.drop(finished.job_id)
        else:
            self.held.published(finished.job_id, finished.attempt, finished.sample)
        self.pool.published(state)
        self.claims.poke()

    def _dropped(self) -> None:
        self.generation.in_flight.abort_dropped()
        self.claims.poke()

    def _failed(self, *what: object) -> None:
        raise SystemExit(f"{self.id}: {what}")


class Pool:
    """A pool of such workers, its client, and the books of a run."""

    def __init__(self, url: str, case: Case) -> None:
        self.case, self.clock, self._url = case, Clock(case.stretch), url
        self.redis: Any = connect(url, pool=POOL)
        most = case.workers + sum(one.what == "joins" for one in changes(case))
        self.waker = self.redis.reader(most + 2)
        self.lease_s = SHORT_LEASE_S if case.churn else LEASE_S
        self.counts: Counter[str] = Counter()
        self.jobs: dict[str, GenerateJob] = {}
        self.lengths: dict[str, tuple[int, ...]] = {}
        self.workers: dict[str, Worker] = {}
        self.loads: list[int] = []
        self.lost: list[Lost] = []
        self.claimed_s = self.ended_s = 0.0
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tasks: set[asyncio.Task[None]] = set()

    def watch(self, loop: Any) -> asyncio.Task[None]:
        task = asyncio.create_task(loop)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self._failure.done():
            self._failure.set_exception(error)

    def admitted(self, claim: Claim) -> None:
        self.counts["admitted"] += claim.n if claim.attempt == 1 else 0
        if not self.loads and self.counts["admitted"] == self.case.samples:
            self.loads = sorted(worker.held.unpublished for worker in self.workers.values())
            self.claimed_s = self.clock.now()

    def published(self, state: str) -> None:
        self.counts[state] += 1
        self.ended_s = self.clock.now()

    async def run(self) -> dict[str, Any]:
        for number in range(self.case.workers):
            await self._join(number)
        bell = Bell(self.waker, POOL)
        await bell.open()
        self.watch(bell.listen(self._on_ring))
        if not self.case.churn:
            self.watch(self._beat())
        while (await self.redis.info("clients"))["blocked_clients"] <= self.case.workers:  # noqa: ASYNC110 – nobody rings
            await asyncio.sleep(0.05)
        for _, job, lengths in jobs_of(self.case):
            self.jobs[job.id], self.lengths[job.id] = job, lengths
        client = Part(drive, self._url, asdict(self.case))
        client.line()
        gc.collect()
        gc.freeze()
        self.counts.clear()
        spent, redis_s = time.process_time(), await self._redis_s()
        began = self.clock.begin()
        client.tell(str(began))
        changing = self.watch(self._change())
        reading = asyncio.create_task(asyncio.to_thread(client.line))
        await asyncio.wait({reading, self._failure}, return_when=asyncio.FIRST_COMPLETED)
        if self._failure.done():
            client.kill()
            self._failure.result()
        reading.result()
        wall = time.monotonic() - began
        spent, redis_s = time.process_time() - spent, await self._redis_s() - redis_s
        counts, count = self.counts, self.case.samples // self.case.n
        moved = int(await self.redis.hget(Keys(POOL).load, "moved") or 0)
        for task in (changing, *self._tasks):
            task.cancel()
        return {
            "makespan_s": round(self.ended_s, 3),
            "claimed_s": round(self.claimed_s, 3),
            "loads": [self.loads[0], self.loads[-1]] if self.loads else None,
            "moves": moved,
            "asked": counts["asked"],
            "claims": counts["claims"],
            "jobs_per_claim": round(counts["given"] / max(1, counts["giving"]), 2),
            "redis_us_per_job": round(1e6 * redis_s / count, 1),
            "redis_share": round(redis_s / wall, 3),
            "harness_share": round(spent / wall, 3),
            "wall_s": round(wall, 1),
            "late_s": round(self.clock.late_s, 3),
            "fenced": counts["fenced"],
            "lost": self.lost,
            "silent_s": round((self.lease_s - SHORT_BEAT_S) / self.case.stretch, 3) if self.case.churn else 0.0,
        }

    async def _join(self, number: int) -> None:
        worker = Worker(self, number)
        await worker.join()
        self.workers[worker.id] = worker

    async def _beat(self) -> None:
        while True:
            for worker in list(self.workers.values()):
                await asyncio.sleep(BEAT_S)
                await worker.lease.heartbeat(worker.status())

    async def _redis_s(self) -> float:
        return busy_s(await self.redis.info("cpu"))

    async def _change(self) -> None:
        for change in changes(self.case):
            await self.clock.until(change.at)
            await self._take_place(change)

    async def _take_place(self, change: Change) -> None:
        if change.what == "joins":
            await self._join(change.number)
            return
        worker = self.workers.pop(f"w{change.number:04d}")
        if change.what == "dies":
            self.lost += [Lost(change.number, *one) for one in worker.die()]
        else:
            await worker.leave()

    def _on_ring(self, ring: dict[str, str]) -> None:
        if ring.get("kind") == "move":
            for giver in set(ring["moves"].split()[::4]) & self.workers.keys():
                self.counts["asked"] += 1
                self.workers[giver].moving.hear(self.workers[giver].lease, ring)


def run_case(case: dict[str, Any]) -> None:
    """The process of one case: it prints its figures."""

    async def run() -> dict[str, Any]:
        return await Pool(server.url, Case(**case)).run()

    with EmbeddedRedis() as server:
        print(json.dumps(asyncio.run(run())))
