"""A fleet in simulated time on a real broker.

Events have simulated times and happen one after the other: the clock stands still while Redis answers, however busy the
host is. So the broker's own delays count nothing, and a day takes as long as its calls do. Everything between Redis and
a worker is real (jobs, claims, pieces, results, leases, the look for dead workers). What is simulated:

- An engine is a rate. Nothing is generated.
- Leases end by the simulated clock: the run renews all of them, also a dead worker's, until the dead one's lease is
  over by simulated time. Then its last renewal is for a millisecond, and the real look for dead workers follows.
- Only those checkpoints are written that somebody will read: the last one before each death.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import count
from typing import Any

from rolloutmq.messages.broker import Broker, Lease, Witness
from rolloutmq.messages.model import GenerateJob, SamplingParams

from .draws import Draws
from .oracle import Oracle, script
from .redis_watch import RedisWatch
from .scaling import Scaler
from .scenario import Scenario
from .timeline import Timeline
from .workers import Sample, SimulatedWorker

POOL, CLIENT = "scale", "scale-client"
LEASE_S = 120.0
"""Real seconds that a simulated worker's lease lasts, so that a stall of this host costs nobody a lease."""
BEAT_S = 15.0
"""Real seconds between two heartbeats of each worker."""
READ_S = 5.0
"""Simulated seconds between two reads of the client."""
MISSES = 8
"""So many workers in a row that get nothing, and the others need not ask."""
GRACE_S = 24 * 3600.0
"""Simulated seconds after the load in which everything has to end."""


class Simulation:
    """One run. partials: whether unfinished samples are saved and handed over."""

    def __init__(self, redis: Any, scenario: Scenario, seed: int, *, partials: bool) -> None:
        self.scenario, self.partials = scenario, partials
        self.oracle, self.timeline = Oracle(), Timeline()
        self.counts: Counter[str] = Counter()
        self.beat_cpu_s, self.beats, self.joined = 0.0, 0, 0
        self.now = 0.0
        self._redis, self._draws = redis, Draws(scenario, seed)
        self._broker, self.watch = Broker(redis, POOL), RedisWatch(redis)
        self.scaler = Scaler(scenario)
        self._witness, self._numbers = Witness(), count()
        self._events: list[tuple[float, int, Callable[[], Awaitable[None]]]] = []
        self._fleet: dict[SimulatedWorker, None] = {}  # those that serve or drain
        self._starting: set[int] = set()  # numbers of workers that are on their way
        self._dead: dict[SimulatedWorker, None] = {}  # their leases are not over yet
        self._roomy: dict[SimulatedWorker, None] = {}  # those with room, who has waited longest first
        self._queued_at: dict[str, tuple[float, str]] = {}  # jobs in the queue: since when, and why
        self._read_to, self._unread, self._next_beat = "0", False, 0.0

    async def run(self) -> None:
        """Until every job has ended, or everything had time to. Raises LeaseLost, and what Redis raises."""
        end = 60 * self.scenario.minutes
        await self._decide()
        self._at(READ_S, self._read)
        self._next_job()
        if self.scenario.wave_s:
            self._at(self.scenario.wave_s, self._wave)
        while self._events and (self.now < end or self.oracle.open) and self.now < end + GRACE_S:
            if time.monotonic() >= self._next_beat:
                await self._beat()
            at, _, happens = heapq.heappop(self._events)
            self.timeline.advance(at)
            self.now = at
            await happens()
            await self._claim()
        self.timeline.advance(self.now)

    def _at(self, at: float, happens: Callable[[], Awaitable[None]]) -> None:
        heapq.heappush(self._events, (at, next(self._numbers), happens))

    @property
    def _loaded(self) -> bool:
        """Whether jobs still arrive, and workers are still pre-empted."""
        return self.now < 60 * self.scenario.minutes

    # --- jobs --------------------------------------------------------------------------------------------------------

    def _next_job(self) -> None:
        if (at := self._draws.next_arrival(self.now)) is not None:
            self._at(at, self._submit)

    async def _submit(self) -> None:
        lengths = self._draws.lengths()
        sampling = SamplingParams(max_new_tokens=max(lengths))
        job = GenerateJob(token_ids=script(0, 8), n=len(lengths), sampling=sampling, reply_to=CLIENT)
        self.oracle.submitted(job.id, lengths)
        await self._broker.enqueue([job])
        self._queue([job.id], "new", self.now)
        self._next_job()

    def _queue(self, jobs: list[str], why: str, since: float) -> None:
        for job_id in jobs:
            self._queued_at[job_id] = since, why

    async def _claim(self) -> None:
        """Workers with room claim while there are jobs, as wake-up tokens have them do."""
        misses = 0
        while self._queued_at and self._roomy and misses < MISSES:
            worker = next(iter(self._roomy))
            del self._roomy[worker]
            claims = await worker.claim()
            misses = 0 if claims else misses + 1
            for claim in claims:
                since, why = self._queued_at.pop(claim.job_id)
                self.timeline.waited(why, self.now - since)
            self._begin(worker)

    def _begin(self, worker: SimulatedWorker) -> None:
        for sample in worker.begin(self.now):
            left = (sample.length - len(sample.before)) / worker.rate
            self._at(self.now + left, partial(self._finish, worker, sample))
        self._changed(worker)

    async def _finish(self, worker: SimulatedWorker, sample: Sample) -> None:
        if sample in worker.running:
            await worker.publish(sample)
            self._unread = True
            self.scaler.ended(sample.length, self.now - sample.began)
            self._begin(worker)
            await self._leave_if_done(worker)

    async def _read(self) -> None:
        self._at(self.now + READ_S, self._read)
        if not self._unread:
            return
        self._unread = False
        while replies := await self._broker.read_replies(CLIENT, self._read_to, count=512):
            for reply in replies:
                self.oracle.arrived(reply.outcome)
                self._queued_at.pop(reply.outcome.job_id if not reply.outcome.ok else "", None)
            await self._broker.ack(CLIENT, replies)
            self._read_to = replies[-1].entry_id

    # --- workers -----------------------------------------------------------------------------------------------------

    def _changed(self, worker: SimulatedWorker) -> None:
        """A worker's samples or its state changed."""
        serves = worker in self._fleet
        self.timeline.uses(worker, len(worker.running) if serves else None)
        if serves and worker.room:
            self._roomy.setdefault(worker)
        else:
            self._roomy.pop(worker, None)

    async def _decide(self) -> None:
        """Have the policy say how many workers there should be, and start or drain some."""
        ready = [worker for worker in self._fleet if not worker.draining]
        queued, starting = self.scenario.group * len(self._queued_at), len(self._starting)
        target = self.scaler.target(self.now, queued, ready, starting, len(self._fleet) - len(ready))
        for _ in range(target - len(ready) - starting):
            number = next(self._numbers)
            self._starting.add(number)
            self._at(self.now + self._draws.start_s(), partial(self._join, number))
        while self._starting and len(ready) + len(self._starting) > target:
            self._starting.remove(max(self._starting))
        self.timeline.starting = len(self._starting)
        # The ones with the least under way, which finish that. Nothing is cut.
        surplus = max(0, len(ready) - target)
        for worker in sorted(ready, key=lambda one: len(one.jobs))[:surplus]:
            worker.draining = True
            self.counts["drained"] += 1
            self._changed(worker)
            await self._leave_if_done(worker)
        self._at(self.now + self.scenario.decide_s, self._decide)

    async def _join(self, number: int) -> None:
        if number not in self._starting:
            return  # not needed any more
        self._starting.remove(number)
        self.timeline.starting = len(self._starting)
        lease = Lease(self._redis, POOL, f"worker-{number:06d}", LEASE_S, self._witness)
        worker = SimulatedWorker(lease, self.scenario.slots, self._draws.rate(), self.oracle, self.partials)
        await lease.join(worker.status())
        self.joined += 1
        self._fleet[worker] = None
        self._changed(worker)
        if (lifetime_s := self._draws.lifetime_s()) < math.inf:
            self._at(self.now + lifetime_s, partial(self._preempt, [worker]))

    async def _leave_if_done(self, worker: SimulatedWorker) -> None:
        if worker.draining and not worker.jobs:
            await self._hand_over(worker)

    async def _hand_over(self, worker: SimulatedWorker) -> None:
        self._gone(worker)
        self._queue(await worker.hand_over(self.now, self.scenario.max_lost), "handed over", self.now)

    def _gone(self, worker: SimulatedWorker) -> None:
        del self._fleet[worker]
        self._changed(worker)

    async def _wave(self) -> None:
        there = list(self._fleet)
        await self._preempt([there[number] for number in self._draws.wave(len(there))])
        self._at(self.now + self.scenario.wave_s, self._wave)

    async def _preempt(self, workers: list[SimulatedWorker]) -> None:
        """Take workers away at one moment. Who has a notice hands over what it has; the others die."""
        dead: dict[SimulatedWorker, list[str]] = {}
        for worker in workers:
            if worker not in self._fleet or not self._loaded:
                continue
            if self._draws.noticed():
                self.counts["pre-empted with notice"] += 1
                await self._hand_over(worker)
            else:
                self.counts["died"] += 1
                self._gone(worker)
                dead[worker] = await worker.die(self.now, self.scenario.checkpoint_s)
        if dead:
            self._dead.update(dict.fromkeys(dead))
            self._at(self.now + self.scenario.lease_s, partial(self._bury, dead, self.now))

    async def _bury(self, dead: dict[SimulatedWorker, list[str]], since: float) -> None:
        """The leases of workers that died together are over: the pool takes their jobs back."""
        for worker in dead:
            del self._dead[worker]
            worker.lease.lease_s = 0.001
            await worker.lease.heartbeat(worker.status())
        removed, last = 0, next(iter(dead)).lease
        while removed < len(dead):
            requeued, lost, _, gone = await last.reap(self.scenario.max_lost)
            removed += gone
            self.counts["jobs lost with their worker"] += requeued + lost
            self.counts["dead-lettered"] += lost
            self._unread = self._unread or lost > 0
            await asyncio.sleep(0.001 if removed < len(dead) else 0)
        self._queue([job_id for jobs in dead.values() for job_id in jobs], "dead", since)

    async def _beat(self) -> None:
        """Renew every lease, also those of the dead that are not over yet, and count what it costs."""
        self._next_beat = time.monotonic() + BEAT_S
        before = await self.watch.cpu_s()
        for worker in (*self._fleet, *self._dead):
            await worker.lease.heartbeat(worker.status())
            self.beats += 1
        self.beat_cpu_s += await self.watch.cpu_s() - before
