"""A worker: claims jobs under its lease, keeps its engine full, publishes, follows the weights, and leaves cleanly."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import secrets
import socket
from functools import partial

from redis.asyncio import Redis
from redis.exceptions import RedisError

from ..messages.broker import Beat, Claim, CommandBox, Finished, Lease, Release, Witness, can_of
from ..messages.errors import EngineError, LeaseLost, MessageError, RequestRefused
from ..messages.model import EXACT, Command, CommandReply, WorkerState, WorkerStatus
from ..messages.redis import Bell, Ring, connect, parse_shards, ping
from ..sync.transfer import Ledger, heard
from .commands import HANDLERS, Commands, WorkerParts, beside, lift
from .config import WorkerConfig
from .engine import POOLING_FEATURES, AdapterMissing, Engine
from .engine_keeper import EngineKeeper
from .generation import Generation
from .jobs import HeldJob, HeldJobs, Run
from .journaling import WorkerJournal
from .lease import Admission, ClaimLoop, Deadlines, Handback, Memberships, Outbox, Results, Saving
from .leaving import PREEMPTED_S, Leaving
from .loops import Loop, undisturbed
from .metrics import Pace, StatusReport, Vitals
from .moving import Moving
from .spot import notices_of, wait_for_notice
from .starting import says_it_starts
from .text import Tokenizer, ToolReader
from .weights import Snapshots, WeightFollower

log = logging.getLogger(__name__)
RETRY_S = 0.2
GATES = frozenset({"pause", "sleep"})
"""Actions that keep a worker from serving until another one ends that."""
AHEAD_S = 1.0
"""Beyond what runs, a worker claims what it can start within so many seconds by the rate at which its samples end."""


class Worker:
    """One engine in one pool. `run` returns after `drain`, or raises EngineError if the engine cannot be kept up."""

    def __init__(self, config: WorkerConfig, engine: Engine, tokenizer: Tokenizer) -> None:
        self.config = config
        self.worker_id = ""
        self.joined = asyncio.Event()
        """Set once the engine is up and the worker holds its first lease."""
        self._engine = engine
        self._host = socket.gethostname()
        self._held = HeldJobs(self._dropped)
        self._tools = ToolReader()
        shards = parse_shards(config.redis_url).count
        self._outbox = Outbox(self._published, self._unpublishable, shards)
        self._results = Results(engine, tokenizer, self._tools, self._outbox, self._refused)
        self._generation = Generation(
            engine,
            config.capacity,
            on_finished=self._finished,
            on_refused=self._refused,
            on_failed=self._failed,
            on_dead=self._engine_died,
        )
        look = self._room, self._weights_here
        self._claims = ClaimLoop(*look, holds=self._held.unpublished_of, pace=lambda: self._generation.pace)
        self.vitals = Vitals(self._generation, config.lease_s)
        self._report = StatusReport(self._host, engine, self._held, self.vitals, config.max_running)
        self._report.hold_version = config.hold_version
        self._saving = Saving(self._held, config.checkpoint_s, engine.progress)
        self._deadlines = Deadlines(self._held)
        self._handback = Handback(self._held, config.max_lost, self._host, lambda: self._lease)
        self._admission = Admission(
            engine,
            tokenizer,
            self._tools,
            self._held,
            self._claims,
            handback=self._handback,
            deadlines=self._deadlines,
            saving=self._saving,
            media_hosts=config.media_hosts,
            begin=self._begin,
            lacks=self._refuse_or_release,
        )
        self._notices = None if config.spot is None else notices_of(config.spot)
        self._journal = WorkerJournal(config.journal, self._status, self._admission.claimed)
        self._follower: WeightFollower | None = None
        self._lease: Lease | None = None
        self._witnesses = [Witness() for _ in range(shards)]
        self._draining = asyncio.Event()
        self._finished_pace, self._finishes_per_s = Pace(), 0.0
        runs = engine, self._generation, self._held, self._outbox
        self._keeper = EngineKeeper(*runs, handback=self._handback, most=config.engine_restarts)
        self._moving = Moving(engine, self._generation, self._held, self._handback)
        self._leaving = Leaving(*runs, self._handback)
        self._commands: Commands | None = None
        self._box: CommandBox | None = None

    # --- life ------------------------------------------------------------------------------------------------------

    def drain(self, within_s: float | None = None) -> None:
        """Claim nothing more, finish what fits into the budget, hand the rest back, leave. SIGTERM calls it.

        within_s: the budget, 2 s at least; None is `drain_s` of the settings. A later call can only bring the end
        nearer.
        """
        self._leaving.by.within(self.config.drain_s if within_s is None else within_s)
        self._draining.set()
        self._claims.poke()

    async def run(self) -> None:
        """Serve until drained. Raises ConfigError, RedisUnavailable or EngineError if it cannot start or go on."""
        snapshots = Snapshots(self.config.snapshots) if self.config.snapshots is not None else None
        redis = connect(self.config.redis_url, pool=self.config.pool)
        listener, waker = (connect(self.config.redis_url, pool=self.config.pool, blocking=True) for _ in range(2))
        ledger = Ledger(redis, self.config.pool)
        self._follower = WeightFollower(
            *(self._engine, self._generation, ledger, self._engine_died),
            journal=self._journal,
            vitals=self.vitals,
            snapshots=snapshots,
            hold=self.config.hold_version,
        )
        parts = WorkerParts(
            *(self._engine, self._generation, self._follower, ledger, self._claims, self._handback, self._outbox),
            journal=self._journal,
            drain=self.drain,
            state_name=self._current_state,
        )
        self._commands = Commands(HANDLERS, parts, self._command_done)
        try:
            await ping(redis)
            async with beside(self._heed_notices(), says_it_starts(redis, self.config.pool, self.joined)):
                await self._start_engine(ledger)
                watched = [] if self.config.metrics_port is None else [self.vitals.watch_cache(self._engine)]
                async with beside(undisturbed(self._commands.run), *watched):
                    while not self._draining.is_set():
                        await self._incarnation(redis, listener, waker, parts)
        finally:
            await self._tools.close()
            await self._engine.close()
            await self._journal.close()
            for client in (redis, listener, waker):
                await client.aclose()

    async def _heed_notices(self) -> None:
        """Hand everything back as soon as the cloud says that it will take this machine away."""
        if self._notices is not None:
            said = await wait_for_notice(self._notices, self.config.spot_endpoint)
            log.warning("this machine will be taken away (%s): leaving within %g s", said, PREEMPTED_S)
            self._journal.worker("pre-empted", notice=said)
            self.drain(PREEMPTED_S)

    async def _start_engine(self, ledger: Ledger) -> None:
        assert self._follower is not None
        newest = False
        if self.config.first_weights == "newest":
            with contextlib.suppress(RedisError, OSError, MessageError):
                newest = await ledger.committed() > 0
        self.vitals.startup.engine_starts()
        await self._keeper.start(self._draining, empty=newest)
        if self._draining.is_set():
            return
        self.vitals.startup.engine_is_up(self._engine.info.startup)
        self._look_at_first_weights()

    def _look_at_first_weights(self) -> None:
        """Of an engine that was just started."""
        info, state = self._engine.info, self._generation.state
        if info.empty:
            log.info("the checkpoint was not read: the pool's newest version comes first")
            state.broken()  # without one in time the engine starts again, with the checkpoint
        elif info.random and self.config.first_weights == "newest":
            log.info("the engine's weights are random: it serves when the first version has come")
            state.is_random()
        elif info.random:
            log.warning("the engine's weights are random (load_format=dummy), and are served as version 0")

    def _engine_restarted(self) -> None:
        assert self._follower is not None
        self._follower.restarted()
        self._look_at_first_weights()

    async def _incarnation(self, redis: Redis, listener: Redis, waker: Redis, parts: WorkerParts) -> None:
        """Serve under one lease, until it is lost or the worker is drained."""
        assert self._follower is not None
        self.worker_id = f"{self._host}-{os.getpid()}-{secrets.token_hex(4)}"
        self._box = CommandBox(redis, self.config.pool, self.worker_id)
        self._lease = lease = self._journal.lease(redis, self.config, self.worker_id, self._witnesses)
        info = self._engine.info
        can = can_of(info.context_length, info.features | {EXACT}, not info.features & POOLING_FEATURES)
        for part in lease.parts:
            part.can, part.engine = can, info.kind
        memberships = Memberships(lease, self.config.beat_s, self.config.max_lost, self._forget, self._claims.poke)
        ears = getattr(listener, "shards", ()) or (listener,)
        bell, *others = bells = [Bell(one, self.config.pool, shard) for shard, one in enumerate(ears)]
        hears = [(its.listen, partial(self._on_ring, part)) for its, part in zip(bells, lease.parts, strict=True)]
        try:
            await bell.open()
            for other in others:  # one that is away is heard later, from its beginning
                with contextlib.suppress(RedisError, OSError):
                    await other.open()
            await memberships.join(self._status())
        except (RedisError, OSError) as error:
            log.warning("cannot join, trying again: %s", error)
            await asyncio.sleep(RETRY_S)
            return
        self.joined.set()
        log.info("joined pool %s as %s", self.config.pool, self.worker_id)
        try:
            async with asyncio.TaskGroup() as tasks:
                taking: list[Loop] = [
                    partial(self._claims.run, lease, waker, self._admission.admit),
                    partial(self._follower.run, self.worker_id, self._weights_changed),
                    partial(self._keeper.run, lease, self._claims, self._engine_restarted),
                ]
                giving: list[Loop] = [
                    partial(memberships.run, lambda: self.vitals.beat(self._status()), self._on_beat),
                    partial(self._outbox.run, lease),
                    partial(self._saving.save_due, lease),
                    partial(self._saving.save_streamed, lease),
                    self._moving.run,
                    partial(self._deadlines.run, lease),
                    *(partial(listen, on_ring) for listen, on_ring in hears),
                ]
                running = [tasks.create_task(undisturbed(loop)) for loop in [*taking, *giving]]
                await self._draining.wait()
                with contextlib.suppress(TimeoutError):
                    async with self._leaving.by.limit(1 / 2):
                        await self._claims.settled(slow=False)
                slow = self._claims.aside
                for task in running[: len(taking)]:
                    task.cancel()
                await self._leaving.leave(lease, slow, partial(lift, parts))
                for task in running:
                    task.cancel()
        except BaseExceptionGroup as group:
            fatal = group.split(LeaseLost)[1]
            if fatal is not None:
                raise fatal.exceptions[0] from None
            log.warning("fenced: %s", group.exceptions[0])
            self._journal.worker("lease lost", error=str(group.exceptions[0]))
            self._forget_everything(lease)
            this = asyncio.current_task()
            if this is not None and this.cancelling() and not self._draining.is_set():
                # Until Python 3.13 a TaskGroup drops a cancellation that comes as one of its tasks fails. One that it
                # makes itself as its block is left stays counted: then the worker is draining, and ends anyway.
                raise asyncio.CancelledError from None

    def _forget(self, lease: Lease) -> None:
        """The lease in one shard of several is lost."""
        self._journal.worker("lease lost", shard=lease.keys.shard)
        self._outbox.clear(lease)
        waiting = (claim.job_id for claim in self._claims.aside)
        for job_id in [*waiting, *(held.id for held in self._held)]:
            if lease.has(job_id):
                self._claims.drop(job_id)
                self._held.drop(job_id)

    def _forget_everything(self, lease: Lease) -> None:
        for held in self._held:
            self._held.drop(held.id)
        self._outbox.clear(lease)
        self._generation.clear()

    # --- jobs in, samples out --------------------------------------------------------------------------------------

    def _room(self) -> int:
        if self._draining.is_set() or not self._generation.state.may_claim:
            return 0
        # Slow media of some jobs keep no others from being claimed, as long as they are fewer than a full worker.
        ahead = min(self.config.capacity - self.config.max_running, math.ceil(self._finishes_per_s * AHEAD_S))
        full = min(self.config.max_running + ahead, self._generation.slots.limit)
        return full - self._held.unpublished - max(0, self._claims.slow() - self.config.capacity)

    def _weights_here(self) -> tuple[int, dict[str, int]]:
        return self._generation.version, self._engine.info.adapters.current()

    def _begin(self, held: HeldJob) -> None:
        self._generation.add(held.samples.values(), end=held.claim.ending)

    async def _refuse_or_release(self, claim: Claim, lacks: AdapterMissing) -> None:
        assert self._follower is not None
        assert self._lease is not None
        if (refusal := await self._follower.adapters.refusal(lacks.adapter)) is not None:
            self._handback.bury(claim.job_id, claim.attempt, "refused", refusal)
        else:  # published since the claim; the job's shard may not know
            its = next(part for part in self._lease.parts if part.has(claim.job_id))
            if len(self._lease.parts) > 1:
                await its.learn(0, await self._follower.adapters.committed())
            await self._lease.release([Release(claim.job_id, claim.attempt)], self.config.max_lost)

    def _finished(self, sample: Run) -> None:
        self._keeper.it_works()
        self.vitals.finished(sample)
        self._results.make(sample, self.worker_id)

    def _refused(self, sample: Run, error: RequestRefused) -> None:
        if self._held.get(sample.job.id, sample.attempt) is not None:
            self._handback.bury(sample.job.id, sample.attempt, "refused", error)

    def _failed(self, sample: Run, error: EngineError | None) -> None:
        held = self._held.get(sample.job.id, sample.attempt)
        if held is not None and self._lease is not None:
            if error is not None:
                log.warning("job %s failed here, another worker may try: %s", held.id, error)
            self._handback.try_elsewhere(self._lease, held, self._outbox.flushed, lost=error is not None)

    def _published(self, finished: Finished, state: str) -> None:
        if state == "fenced":
            self._report.refused_publishes += 1
            self._held.drop(finished.job_id, finished.attempt)
        else:
            self._held.published(finished.job_id, finished.attempt, finished.sample)
        self._claims.poke()

    def _unpublishable(self, finished: Finished, error: Exception) -> None:
        if self._held.get(finished.job_id, finished.attempt) is not None:
            self._handback.bury(finished.job_id, finished.attempt, "cannot be published", error)

    def _dropped(self) -> None:
        self._generation.in_flight.abort_dropped()
        self._claims.poke()

    # --- what it hears ---------------------------------------------------------------------------------------------

    async def _on_beat(self, lease: Lease, beat: Beat) -> None:
        """lease: the one in the shard that answered."""
        assert self._follower is not None
        held_here = {held.id for held in self._held if lease.has(held.id)}
        if beat.held < len(held_here):
            # They were cancelled or expired, and the bell was missed. Jobs in the outbox are being published right now.
            gone = held_here - self._outbox.jobs() - await lease.held()
            # Given back, because Redis may have lost the list and not the jobs. What has ended is not taken again.
            await self._handback.release(lease, [held for held in self._held if held.id in gone])
        await self._handback.disown(lease, beat.held > len(held_here), self._known)
        if lease.keys.shard == 0:
            self.vitals.committed = beat.committed
            self._generation.slots.grow()
            self._finishes_per_s = self._finished_pace.per_s(self._generation.finished)
        self._follower.beat(beat.committed, beat.epoch)
        if not self._generation.state.dead.is_set() and not await self._engine.healthy():
            self._engine_died()

    def _known(self) -> set[str] | None:
        if self._claims.under_way:
            return None
        slow = {claim.job_id for claim in self._claims.aside}
        return {held.id for held in self._held} | self._outbox.jobs() | slow

    def _on_ring(self, part: Lease, ring: Ring) -> None:
        kind = ring.get("kind")
        if kind == "cancel":
            for job_id in ring.get("ids", "").split():
                self._claims.drop(job_id)
                self._held.drop(job_id)
        elif kind == "stop":
            for held in filter(None, map(self._held.get, ring.get("ids", "").split())):
                self._generation.end(held.samples.values())
        elif kind == "move" and not self._draining.is_set():
            self._moving.hear(part, ring)
        elif kind == "weights" and self._follower is not None:
            if (told := heard(ring)) is not None:
                self._follower.hear(told)
            elif "over" in ring and (epoch := ring.get("epoch", "")).isdecimal():
                self._follower.hear_of_end(int(epoch))
        elif kind == "command" and self._commands and self._box and ring.get("worker", "") in {"", self.worker_id}:
            self._commands.hear(self._box, ring.get("id", ""))

    def _command_done(self, command: Command, reply: CommandReply) -> None:
        """A command was done, or refused."""
        self._journal.command(command, reply)
        if reply.ok and command.action in GATES:
            ordered = f"{command.action} {command.params.get('mode', '')}".strip()
            self._generation.state.ordered_by = ordered + (f" by {command.sender}" if command.sender else "")

    def _engine_died(self) -> None:
        if self._generation.state.died():  # an update under way gives up the turn, which the restart waits for
            self._journal.worker("engine died")

    def _weights_changed(self, waiting: bool) -> None:
        if self._generation.state.in_service:
            self.vitals.startup.serves()
        if waiting or (self._lease is not None and len(self._lease.parts) > 1):  # other shards were not asked
            self._claims.poke()

    def _status(self) -> WorkerStatus:
        assert self._follower is not None
        state, keeper = self._current_state(), self._keeper
        blocks, starts = self._generation.state.blocks() | self._follower.blocks(), (keeper.restarts, keeper.in_a_row)
        return self._report.write(self.worker_id, state, blocks, self._follower.warning, starts)

    def _current_state(self) -> WorkerState:
        return self._generation.state.named(draining=self._draining.is_set())
