"""Pools with two shards, each on a Redis of its own: workers and servers that die."""

from __future__ import annotations

from rolloutmq.messages import Broker
from rolloutmq.messages.redis import shard_of

from ..context import Chaos, until
from ..scenario import scenario


@scenario("shards_kill_worker", shards=2)
async def kill_worker(chaos: Chaos) -> None:
    """SIGKILL of a worker that holds jobs of both shards, some of them partly published."""
    victim = await chaos.worker(max_running=128, prefetch=0, tokens_per_s=20)
    async with chaos.client() as trainer, chaos.broker() as broker:
        await trainer.submit(chaos.jobs(16, n=4, tokens=4) + chaos.jobs(24, n=4, tokens=200))
        await until(lambda: _held_in_each(broker, victim.id), what="jobs of both shards to run")
        await trainer.take(chaos.rng.randint(1, 32))
        await chaos.start_workers(2, max_running=128, tokens_per_s=2000)
        await chaos.died(victim)
        await trainer.take()


@scenario("shards_kill_redis", shards=2, timeout_s=90.0)
async def kill_redis(chaos: Chaos) -> None:
    """SIGKILL of one shard's Redis for longer than the lease. The other shard's jobs go on; when it is back, all are
    answered."""
    await chaos.start_workers(2, max_running=64, tokens_per_s=100)
    async with chaos.client() as trainer, chaos.broker() as broker:
        jobs = chaos.jobs(60, n=2, tokens=60)
        await trainer.submit(jobs)
        await until(lambda: _running(broker), what="jobs of both shards to run")
        server = chaos.servers[1]
        server.kill()
        here = sum(job.n for job in jobs if shard_of(job.id, 2) == 0)
        taken = await trainer.take(here)
        chaos.expect(sum(shard_of(one.job_id, 2) == 0 for one in taken) > here / 2, "the other shard's jobs go on")
        server.restart()
        await trainer.take()


async def _held_in_each(broker: Broker, worker: str) -> bool:
    return all([await part.redis.scard(part.keys.held(worker)) > 4 for part in broker.parts])


async def _running(broker: Broker) -> bool:
    counts = []
    for part in broker.parts:
        workers = await part.redis.zrange(part.keys.workers, 0, -1)
        counts.append(sum([await part.redis.scard(part.keys.held(worker.decode())) for worker in workers]))
    return min(counts) > 4
