"""A look at a pool in which somebody has broken a job's record."""

from __future__ import annotations

from support.specimens.messages import job

from rolloutmq.messages import Broker, connect
from rolloutmq.ops.top.reader import Focus, Reader


async def test_a_record_of_another_type_hides_no_other_job(redis_db: str, broker: Broker) -> None:
    good, broken = job(), job()
    await broker.enqueue([good, broken])
    async with connect(redis_db) as redis:
        await redis.set(broker.keys.job(broken.id), "no hash")
        look = await Reader(redis, "default").look(Focus(worker="", rows=10))
    assert {job_id: line.state for job_id, line in look.jobs.items()} == {good.id: "queued", broken.id: "gone"}
