"""A worker without an engine: the broker's real lease, and samples that take as long as they would take."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from rolloutmq.messages.broker import Claim, Finished, Lease, Piece, Release
from rolloutmq.messages.codec import decode
from rolloutmq.messages.model import Partial, RolloutResult, Segment, WorkerStatus

from ..parts import BenchFailed
from .oracle import Oracle, script

MAX_JOBS = 256


@dataclass(slots=True, eq=False)
class Sample:
    """One sample on a worker. before: what earlier workers generated of it, read from their pieces. began: when this
    worker began it, in simulated seconds."""

    job_id: str
    attempt: int
    index: int
    n: int
    length: int
    before: npt.NDArray[np.int32]
    pieces: int
    began: float = 0.0

    def tokens(self, seconds: float, rate: float) -> int:
        """Tokens that there are of it, with those of earlier workers, `seconds` after it began here."""
        return min(self.length, len(self.before) + int(seconds * rate))


@dataclass(slots=True, eq=False)
class SimulatedWorker:
    """One worker. rate: tokens a second of each of its samples. partials: whether it hands over what it has generated
    of unfinished samples; without, the next worker begins them anew."""

    lease: Lease
    slots: int
    rate: float
    oracle: Oracle
    partials: bool
    draining: bool = False
    running: list[Sample] = field(default_factory=list)
    waiting: deque[Sample] = field(default_factory=deque)

    @property
    def room(self) -> int:
        """Samples that it may claim."""
        return 0 if self.draining else max(0, self.slots - len(self.running) - len(self.waiting))

    @property
    def jobs(self) -> dict[str, int]:
        """Jobs that it holds, with the attempt of each."""
        return {sample.job_id: sample.attempt for sample in (*self.running, *self.waiting)}

    def status(self) -> WorkerStatus:
        """What its heartbeats say."""
        return WorkerStatus(
            worker_id=self.lease.worker_id,
            host="simulated",
            pid=1,
            state="draining" if self.draining else "serving",
            version=0,
            max_running=self.slots,
            running=len(self.running),
            held=len(self.running) + len(self.waiting),
        )

    async def claim(self) -> list[Claim]:
        """Take as many jobs as it has room for."""
        claims = await self.lease.claim(min(self.room, MAX_JOBS), self.room, 0)
        for claim in claims:
            for index in sorted(set(range(claim.n)) - claim.published):
                pieces = [decode(piece, Partial) for piece in claim.partials.get(index, ())]
                before = np.concatenate([script(0, 0), *(piece.token_ids for piece in pieces)])
                length = self.oracle.lengths[claim.job_id][index]
                self.waiting.append(
                    Sample(claim.job_id, claim.attempt, index, claim.n, length, before, pieces=len(pieces))
                )
        return claims

    def begin(self, now: float) -> list[Sample]:
        """Begin what has a slot."""
        begun = [self.waiting.popleft() for _ in range(min(len(self.waiting), self.slots - len(self.running)))]
        for sample in begun:
            sample.began = now
        self.running += begun
        return begun

    async def publish(self, sample: Sample) -> None:
        """Publish a sample that has ended."""
        self.running.remove(sample)
        self.oracle.generated += sample.length - len(sample.before)
        token_ids = np.concatenate([sample.before, script(len(sample.before), sample.length)])
        result = RolloutResult(
            job_id=sample.job_id,
            sample=sample.index,
            n=sample.n,
            group_id=sample.job_id,
            token_ids=token_ids,
            logprobs=np.zeros(len(token_ids), np.float32),
            finish_reason="length",
            segments=(Segment(0, len(token_ids)),),
            worker_id=self.lease.worker_id,
            attempt=sample.attempt,
        )
        await self.lease.complete([Finished(sample.job_id, sample.attempt, sample.index, result)])

    async def hand_over(self, now: float, max_lost: int) -> list[str]:
        """Stop, give everything back with its partials, and leave. Returns the jobs, oldest first.

        Raises BenchFailed if the broker says that it still holds some.
        """
        pieces = self._pieces([now - sample.began for sample in self.running])
        jobs = sorted(self.jobs.items())
        self._stop(now)
        releases = [
            Release(job_id, attempt, tuple(piece for piece in pieces if piece.job_id == job_id))
            for job_id, attempt in reversed(jobs)  # each goes to the front of its queue: the oldest last
        ]
        if releases:
            await self.lease.release(releases, max_lost)
        if still := await self.lease.leave():
            raise BenchFailed(f"{self.lease.worker_id} still holds {still} jobs that it has given back")
        return [job_id for job_id, _ in jobs]

    async def die(self, now: float, checkpoint_s: float) -> list[str]:
        """Stop without a word. The pool has what was due to be saved by then. Returns the jobs that it held."""
        saved = self._pieces([(now - sample.began) // checkpoint_s * checkpoint_s for sample in self.running])
        if saved:
            await self.lease.checkpoint(saved)
        jobs = sorted(self.jobs)
        self._stop(now)
        return jobs

    def _stop(self, now: float) -> None:
        for sample in self.running:
            self.oracle.generated += sample.tokens(now - sample.began, self.rate) - len(sample.before)
        self.running.clear()
        self.waiting.clear()

    def _pieces(self, seconds: Sequence[float]) -> list[Piece]:
        """What each running sample has generated here by then, and the pool does not have."""
        if not self.partials:
            return []
        pieces = []
        for sample, passed in zip(self.running, seconds, strict=True):
            start, end = len(sample.before), sample.tokens(passed, self.rate)
            if end > start:
                partial = Partial(
                    start=start,
                    token_ids=script(start, end),
                    logprobs=np.zeros(end - start, np.float32),
                    segments=(Segment(0, end - start),),
                )
                pieces.append(Piece(sample.job_id, sample.attempt, sample.index, sample.pieces, partial))
        return pieces
