"""A pool's day that is known from beginning to end, played on a real server: what the oracle is tested with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from support.pools.pool import status

from rolloutmq.messages import Broker, Finished, GenerateJob, Lease, RolloutResult, SamplingParams, Segment, connect
from rolloutmq.messages.broker.lease import Claim
from rolloutmq.messages.errors import LeaseLost
from rolloutmq.ops.redis.embedded import EmbeddedRedis
from rolloutmq.worker.scripted.engine import scripted_token

from . import aof, journal, ledger
from .baseline import Rest, judge_rest, look
from .oracle import Terms, Verdict, judge

MAX_LOST = 3


@dataclass(frozen=True)
class Evidence:
    """What the oracle is given."""

    events: list[ledger.Event]
    submitted: list[journal.Submitted]
    received: list[journal.Received]
    before: Rest
    after: Rest

    def judged(self, terms: Terms | None = None) -> Verdict:
        verdict = judge(self.events, self.submitted, self.received, terms)
        judge_rest(self.before, self.after, self.events, verdict, terms)
        return verdict

    def rules(self) -> set[str]:
        return {rule for rule, _ in self.judged().violations}


def made(job: GenerateJob, sample: int, worker: str, attempt: int, version: int = 0) -> RolloutResult:
    """What a truthful worker publishes: two tokens."""
    assert job.token_ids is not None
    stream, first = f"{job.id}{sample:04x}", len(job.token_ids)
    return RolloutResult(
        job_id=job.id,
        sample=sample,
        n=job.n,
        group_id=job.group,
        token_ids=[scripted_token(stream, first + i, version) for i in range(2)],
        finish_reason="length",
        segments=(Segment(version, 2),),
        worker_id=worker,
        attempt=attempt,
    )


class Story:
    """A pool's day: samples published twice over, a frozen worker that comes back, a cancelled job and a poison one."""

    def __init__(self, broker: Broker, book: journal.Journal) -> None:
        self.broker, self.book = broker, book
        fields = {"token_ids": [1, 2, 3], "reply_to": "client", "sampling": SamplingParams(max_new_tokens=2)}
        self.pair, self.single, self.poison, self.unwanted = (
            GenerateJob(**fields, n=n, group_id="g") for n in (2, 1, 1, 1)
        )
        self.jobs = {job.id: job for job in (self.pair, self.single, self.poison, self.unwanted)}

    async def tell(self) -> None:
        await self.enqueue(self.pair, self.single, self.unwanted)
        await self.broker.cancel([self.unwanted.id])
        frozen = await self.join("frozen")
        first = await frozen.claim(8, 8, 0)
        await self.publish(frozen, first, samples=[0])
        await self.publish(frozen, first, samples=[0])  # sent again: its reply was lost
        await self.expire(frozen)
        heir = await self.join("heir")
        await heir.reap(MAX_LOST)
        second = await heir.claim(8, 8, 0)
        await self.publish(frozen, first, samples=[0, 1])  # it thawed
        await self.publish(heir, second, samples=[0, 1])
        await self.enqueue(self.poison)
        for turn in range(MAX_LOST):
            victim = await self.join(f"victim{turn}")
            await victim.claim(8, 8, 0)
            await self.expire(victim)
            await heir.reap(MAX_LOST)
        await heir.leave()
        await self.take()

    async def enqueue(self, *jobs: GenerateJob) -> None:
        await self.broker.enqueue(jobs)
        for job in jobs:
            self.book.submitted(job, "client")

    async def join(self, worker_id: str) -> Lease:
        lease = Lease(self.broker.redis, "default", worker_id)
        await lease.join(status(worker_id))
        return lease

    async def publish(self, lease: Lease, claims: list[Claim], samples: list[int]) -> None:
        finished = [
            Finished(claim.job_id, claim.attempt, sample, made(job, sample, lease.worker_id, claim.attempt))
            for claim in claims
            for sample in samples
            if sample < (job := self.jobs[claim.job_id]).n
        ]
        await lease.complete(finished)

    async def expire(self, lease: Lease) -> None:
        """A lease that is over, as after a long silence."""
        try:
            await lease.heartbeat(status(lease.worker_id))
        except LeaseLost:
            return
        await self.broker.redis.zadd(self.broker.keys.workers, {lease.worker_id: 1})

    async def take(self) -> None:
        while replies := await self.broker.read_replies("client", "0"):
            for reply in replies:
                self.book.received(reply.outcome, "client")
            await self.broker.ack("client", replies)


async def evidence(directory: Path) -> Evidence:
    with EmbeddedRedis(appendonly=True, directory=directory / "redis", config=aof.SETTINGS) as server:
        async with connect(server.url) as redis:
            broker = Broker(redis, "default")
            prefix = broker.keys.prefix
            before = await look(redis, prefix, prefix)
            book = journal.Journal(directory / "journal", "driver")
            await Story(broker, book).tell()
            book.close()
            after = await look(redis, prefix, prefix)
        server.kill()  # the log has everything that was answered
    events = ledger.tell(aof.read_commands(directory / "redis"), prefix)
    return Evidence(events, *journal.read(directory / "journal"), before, after)
