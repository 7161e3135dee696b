"""One job id for two things."""

from __future__ import annotations

import asyncio

from rolloutmq import GenerateJob
from rolloutmq.messages.errors import RolloutMQError

from ..context import Chaos, Trainer
from ..scenario import scenario


@scenario("a_job_id_that_is_taken", lossless=True)
async def job_ids(chaos: Chaos) -> None:
    """A job id that another client has open, and other content under an open id: both are refused where they are
    submitted, and whoever had the id first notices nothing."""
    await chaos.worker(max_running=16, tokens_per_s=100)
    async with chaos.client(client_id="first") as first, chaos.client(client_id="second", patience=5.0) as second:
        jobs = chaos.jobs(12, n=2, tokens=60)
        await first.submit(jobs)
        for job in chaos.rng.sample(jobs, 6):
            await _refused(chaos, second, job, "another client's job id")
            other = job.model_copy(update={"token_ids": job.token_ids[::-1] + 1, "n": 3})  # type: ignore[index]
            await _refused(chaos, first, other, "other content under a known id")
        await first.submit(jobs)  # the very same is no mistake
        own = chaos.jobs(12, tokens=5)
        await second.submit(own)
        taken = await asyncio.gather(first.take(), second.take())
        chaos.expect([len(one) for one in taken] == [24, 12], f"outcomes: {[len(one) for one in taken]}")
        chaos.expect(first.client.outstanding + second.client.outstanding == 0, "something is waited for, for ever")


async def _refused(chaos: Chaos, trainer: Trainer, job: GenerateJob, what: str) -> None:
    try:
        await trainer.client.submit(job)
    except RolloutMQError as error:
        chaos.expect(job.id in str(error), f"{what}: the error does not name the job: {error}")
        chaos.notes["refused_with"] = type(error).__name__
    else:
        chaos.expect(False, f"{what} was accepted")
