"""SIGTERM: what fits into the budget is finished, the rest goes on elsewhere, nothing is generated twice."""

from __future__ import annotations

import time

from ..context import Chaos
from ..looks import running
from ..scenario import scenario

LEAVE_S = 2.0
"""Of its budget a worker keeps this much for handing back."""


def _sigterm(budget: float) -> None:
    @scenario(f"sigterm_within_{budget:g}_s", lease_s=2.0, lossless=True, timeout_s=90.0)
    async def sigterm(chaos: Chaos) -> None:
        """Short generations, some that just fit, and some that never would."""
        speed, fits = 50, budget - LEAVE_S
        leaving = await chaos.worker(max_running=64, prefetch=8, tokens_per_s=speed, drain_s=budget)
        lengths = [int(speed * fits * part) for part in (0.2, 0.5, 0.8)] + [int(speed * fits * 4)]
        jobs = [job for length in lengths for job in chaos.jobs(8, n=2, tokens=length)]
        waiting = chaos.jobs(8, tokens=10)
        async with chaos.client() as trainer, chaos.broker() as broker:
            await trainer.submit(jobs)
            await running(broker, 32)
            await trainer.submit(waiting)  # afterwards: the jobs of several shards do not come in order
            began = time.monotonic()
            code = await leaving.drain(budget + 1)
            took = time.monotonic() - began
            chaos.expect(code == 0, f"exit code {code}")
            chaos.expect(took <= budget, f"it took {took:.2f} s")
            chaos.expect(leaving.id not in [one.worker_id for one in await broker.workers()], "it did not leave")
            heir = await chaos.worker(max_running=64, tokens_per_s=100 * speed)
            taken = await trainer.take()
        await heir.drain(10)
        generated = await leaving.heard("generated") + await heir.heard("generated")
        wasted = generated - sum(len(one.token_ids) for one in taken)
        by_first = {one.job_id for one in taken if one.attempt == 1}
        chaos.notes |= {"drain_s": round(took, 2), "wasted_tokens": wasted}
        chaos.expect(wasted == 0, f"{wasted} tokens were generated again")
        chaos.expect(by_first >= {job.id for job in jobs[:24]}, "what would have fitted was handed back")
        chaos.expect(not by_first & {job.id for job in jobs[24:]}, "a long generation ended too early")


for _budget in (5.0, 30.0):
    _sigterm(_budget)
