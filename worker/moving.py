"""Moves: a worker that has more than its share gives some of it to one that has less, as the claim script plans it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import NamedTuple

from redis.exceptions import RedisError

from ..messages.broker import Lease
from ..messages.model import GenerateJob
from ..messages.redis import Ring
from .engine import Engine
from .generation import CROWD, Generation
from .jobs import HeldJob, HeldJobs, SampleRun
from .lease import Handback

log = logging.getLogger(__name__)
MOST_MOVES = 3
"""So often a job is moved, or interrupted for it in vain."""
PREFILLS = 100
"""Tokens of a prompt that an engine reads in the time of one step."""
MARGIN = 2.0
"""A running job is moved for a gain of so many times what it costs."""


class Plan(NamedTuple):
    """taker: who gets about so many samples. version: of its weights. level: samples that each has when it is done."""

    taker: str
    version: int
    samples: int
    level: int


def plans_for(worker_id: str, ring: Ring) -> list[Plan]:
    """What a ring says that this worker should give; nothing for a ring that says it in another way."""
    try:
        words, level = ring["moves"].split(), int(ring["level"])
        rows = zip(words[::4], words[1::4], words[2::4], words[3::4], strict=True)
        return [Plan(taker, int(v), int(n), level) for giver, taker, v, n in rows if giver == worker_id and int(n) > 0]
    except (KeyError, ValueError):
        return []


def gain(prompt: int, generated: Sequence[int], most: int, mean: float, fewer: int) -> float:
    """Steps of an empty engine that a running job wins by going on where `fewer` samples less run at once.

    prompt: its tokens, which its samples share. generated: tokens of each sample so far; most: that each may generate.
    mean: tokens of an ended sample, 0 if that is not known. A sample's end is expected there, or when it is half as
    long again. Before anything has ended it is expected half way to the most that it may generate.
    """
    left = (min(most - so_far, max(mean - so_far, so_far / 2)) if mean else (most - so_far) / 2 for so_far in generated)
    return sum(left) * fewer / CROWD - MARGIN * (prompt + sum(generated)) / PREFILLS


class Moving:
    """The giver's side, over all incarnations of a worker."""

    def __init__(self, engine: Engine, generation: Generation, held: HeldJobs, handback: Handback) -> None:
        self._engine, self._generation, self._held, self._handback = engine, generation, held, handback
        self._plans: list[tuple[Plan, Lease]] = []
        self._heard = asyncio.Event()

    def hear(self, lease: Lease, ring: Ring) -> None:
        """Somebody has less than its share, in the shard of this lease. The newest ring says it all."""
        if plans := plans_for(lease.worker_id, ring):
            self._plans = [(plan, lease) for plan in plans]
            self._heard.set()

    async def run(self) -> None:
        """Give until cancelled."""
        while True:
            self._heard.clear()  # what was heard before, or while this worker gave, counts what it has no more
            await self._heard.wait()
            for plan, lease in self._plans:
                await self._give(plan, lease)

    def choose(self, plan: Plan, lease: Lease) -> list[HeldJob]:
        """Jobs to be moved: the newest that are not in the engine, then those of which a move wins most."""
        here = [held for held in self._held if lease.has(held.id)]
        load = self._held.unpublished_of(lease)
        # What this worker has in other shards, the taker has there, too.
        fewer = self._generation.running - (self._held.unpublished - load) - plan.level
        movable = [held for held in here if self._may_move(held, plan)]
        # While the gate is shut an update may wait for what runs, and what was interrupted could not run on.
        runs = [held for held in movable if _runs(held)] if self._generation.gate.is_open else []
        gains = [(self._gain(held, fewer), held) for held in runs]
        worth = [held for won, held in sorted(gains, key=lambda one: -one[0]) if won > 0]
        chosen, given = list[HeldJob](), 0
        for held in [*(held for held in reversed(movable) if not _runs(held)), *worth]:
            n = len(held.samples)
            # Whole jobs, rounded to what was asked; and never so that the taker has as much as this worker had.
            if given + n / 2 <= plan.samples and plan.level - plan.samples + given + n < load - given:
                chosen.append(held)
                given += n
        return chosen

    def _gain(self, held: HeldJob, fewer: int) -> float:
        samples = [one for one in held.samples.values() if isinstance(one, SampleRun)]
        prompt, job = samples[0].prompt, samples[0].job
        if any(one.starts_over or (one.stream and not one.stream.shown(1)) for one in samples):
            return 0.0  # it would lose what it has, or has tokens that its client may not see yet
        generated = [self._generated(one) for one in samples]
        return gain(len(prompt), generated, job.sampling.max_new_tokens, self._generation.mean_tokens, fewer)

    def _generated(self, sample: SampleRun) -> int:
        known, more = sample.known_tokens, None
        if sample.leg is not None:
            more = self._engine.progress(sample.leg.request_id, known - len(sample.tokens))
        return known + (len(more.token_ids) if more is not None else 0)

    def _may_move(self, held: HeldJob, plan: Plan) -> bool:
        claim, job = held.claim, held.job
        if claim.preferred or claim.lost or claim.ending or claim.moves + held.in_vain >= MOST_MOVES:
            return False
        if not isinstance(job, GenerateJob) or job.session_id is not None:
            return False
        if job.exact_version not in (None, plan.version):
            return False
        samples = [one for one in held.samples.values() if isinstance(one, SampleRun)]
        if any(one.finish_reason is not None or one.ending for one in samples):
            return False
        # What has begun goes on under the weights that it would have here: never older ones, nor newer ones too early.
        begun = [one.newest for one in samples if one.newest is not None]
        return not begun or max(begun) <= self._generation.version == plan.version

    async def _give(self, plan: Plan, lease: Lease) -> None:
        chosen = self.choose(plan, lease)
        samples = [sample for held in chosen for sample in held.samples.values()]
        interrupted = [held for held in chosen if _runs(held)]
        try:
            out = {id(one) for one in await self._generation.take_out(samples)}
            # Meanwhile some may have ended or failed, and the weights may be newer.
            ready = [held for held in chosen if all(id(one) in out for one in held.samples.values())]
            await self._handback.hand_over(lease, [held for held in ready if self._may_move(held, plan)], plan.taker)
        except (RedisError, OSError) as error:  # what was given all the same is fenced, as the next heartbeat tells
            log.warning("nothing more is given to %s for now: %s", plan.taker, error)
        finally:
            for held in interrupted:  # of those that have left nobody asks
                held.in_vain += 1
            self._generation.put_back(samples)


def _runs(held: HeldJob) -> bool:
    return any(one.leg is not None for one in held.samples.values())
