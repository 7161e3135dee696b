"""A disk that takes its time: what had been accepted when the server was killed, at each level of durability."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial

from rolloutmq.messages import Broker
from rolloutmq.ops.redis.embedded import find_server, server_version

from ..context import Chaos, asking, until
from ..scenario import scenario
from .servers import submit_batches

SLOW_S = 1.5
"""A flush takes so long. Under `everysec` Redis postpones writes while one is under way, and answers all the same."""
KILLS = 3


@scenario("slow_disk_everysec", lease_s=5.0, bent=True, config={"appendfsync": "everysec"})
async def everysec(chaos: Chaos) -> None:
    """Without waiting for the disk, a killed server loses what it had not written: `lost` counts the accepted jobs. All
    others end exactly once, and nothing is handed to the client twice."""
    chaos.terms = replace(chaos.terms, forgotten=True, rewound=True)
    await _kill_again_and_again(chaos, chaos.url)


@scenario("slow_disk_always", lossless=True, lease_s=20.0, bent=True, config={"appendfsync": "always"}, timeout_s=120.0)
async def always(chaos: Chaos) -> None:
    """A server that flushes before it answers loses nothing, however slow its disk is."""
    chaos.host.flush_s = 0.02
    await _kill_again_and_again(chaos, chaos.url, slow_s=0.02)


HAS_WAITAOF = (server_version(find_server()) or (0, 0)) >= (7, 2)
"""`durable=disk` wants an older server to flush before it answers."""
LEVEL = "everysec" if HAS_WAITAOF else "always"


@scenario("slow_disk_durable", lossless=True, lease_s=20.0, bent=True, config={"appendfsync": LEVEL}, timeout_s=120.0)
async def durable(chaos: Chaos) -> None:
    """The same server as in the first one, with clients and workers that wait for its disk: nothing that was accepted
    is lost. Outcomes may be handed out before their worker has its answer; the client keeps back what comes again."""
    chaos.terms = replace(chaos.terms, rewound=True)
    await _kill_again_and_again(chaos, asking(chaos.url, "durable=disk"), SLOW_S if HAS_WAITAOF else 0.02)


async def _kill_again_and_again(chaos: Chaos, url: str, slow_s: float = SLOW_S) -> None:
    await chaos.start_workers(2, url, max_running=64, tokens_per_s=100)
    async with chaos.client(url, patience=12.0) as trainer:
        submitting = asyncio.create_task(submit_batches(chaos, trainer, 40))
        for _ in range(KILLS):
            chaos.host.flush_s = slow_s
            await asyncio.sleep(chaos.rng.uniform(1.2, 2.4))  # how long it has been slow when the server is killed
            await trainer.take_at_least(1)
            chaos.redis.kill()
            chaos.host.flush_s = 0.0
            await asyncio.to_thread(chaos.redis.start)
        await submitting
        await trainer.take()  # also of jobs that nobody knows any more
        # What the server forgot of jobs whose outcomes the client has: they run, and end, once more.
        await until(partial(_all_ended, trainer.client.broker), what="jobs to end again")
        chaos.notes["repeats_kept_back"] = trainer.client.repeats


async def _all_ended(broker: Broker) -> bool:
    return (await broker.load()).open_jobs == 0
