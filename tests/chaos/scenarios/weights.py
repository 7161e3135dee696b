"""Weights change while workers die: every token still says which version sampled it."""

from __future__ import annotations

import asyncio

from rolloutmq import JobFailure, WeightPublisher

from ..context import POOL, Chaos
from ..scenario import scenario

VERSIONS = 5


@scenario("weights_under_fire", lease_s=1.0, timeout_s=120.0)
async def weights(chaos: Chaos) -> None:
    """Real transfers of five versions, samples that cross them, and a worker killed in the middle of one."""
    import torch  # noqa: PLC0415 – seconds, and only here

    publisher = await asyncio.to_thread(WeightPublisher, chaos.url, POOL)
    chaos.ends_with(publisher.close)
    workers = await chaos.start_workers(2, max_running=32, tokens_per_s=100, torch=True)
    unlucky = chaos.rng.randint(2, VERSIONS - 1)
    async with chaos.client() as trainer:
        for version in range(1, VERSIONS + 1):
            await trainer.submit(chaos.jobs(20, n=2, tokens=chaos.rng.randint(60, 150)))
            handle = publisher.publish(version, [("w", torch.full((1000,), float(version)))])
            waiting = asyncio.create_task(asyncio.to_thread(handle.wait, 60))
            if version == unlucky:
                await asyncio.sleep(chaos.rng.uniform(0, 0.1))
                await workers.pop().kill()
                workers += await chaos.start_workers(1, max_running=32, tokens_per_s=100, torch=True)
            report = await waiting
            # Who dies in the middle of a transfer takes nothing along: the other one has the version from the trainer.
            chaos.expect(report.state == "committed", f"version {version} is {report.state}")
            chaos.expect(workers[0].id in report.workers, f"an innocent worker has no version {version}: {report}")
            await trainer.take(chaos.rng.randint(1, 20))
        demanding = chaos.jobs(10, min_version=VERSIONS)
        await trainer.submit(demanding)
        taken = await trainer.take()
    ids = {job.id for job in demanding}
    chaos.expect(not any(isinstance(one, JobFailure) for one in taken), "a job failed")
    chaos.expect(all(one.oldest_version == VERSIONS for one in taken if one.job_id in ids), "older weights were used")
    chaos.notes["samples_across_versions"] = sum(len(one.segments) > 1 for one in taken)
