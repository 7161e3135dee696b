"""Everything at once, for minutes."""

from __future__ import annotations

import asyncio
import random
import signal
from collections import Counter
from dataclasses import replace

from rolloutmq import WeightPublisher

from ..adapters import NAMES, Adapters
from ..context import POOL, Chaos, until
from ..faults import WORKER, Faults
from ..processes import MatrixProcess, Spoken
from ..scenario import scenario

TRAINERS, WORKERS, HANDS = 2, 3, 2
FINISH_S = 120.0


@scenario("kill_matrix", lease_s=1.5, slow=True, lasts=True, finish_s=300.0, config={"appendfsync": "always"})
async def matrix(chaos: Chaos) -> None:
    """Two trainers that ask for every kind of job in every way, three workers, versions of two LoRA adapters, and two
    hands that break things at random: workers, trainers, the server, the networks of both sides. Then peace; and
    everything has ended."""
    chaos.terms = replace(chaos.terms, giving_up=frozenset(f"trainer{number}.batches" for number in range(TRAINERS)))
    near, far = await chaos.proxy(), await chaos.proxy()
    publisher = await asyncio.to_thread(
        lambda: WeightPublisher(near.url, POOL, join_timeout_s=2.0, transfer_timeout_s=3.0)
    )
    chaos.ends_with(publisher.close)
    adapters = Adapters(publisher, random.Random(chaos.rng.random()))
    begun: Counter[int] = Counter()

    async def begin(number: int) -> Spoken:
        begun[number] += 1
        run = f"trainer{number}-{begun[number]}"
        where = (near.url, f"trainer{number}", str(chaos.rng.random()), str(chaos.directory / "journal"), run)
        process = await MatrixProcess.start("matrix_process", chaos.directory / f"{run}.log", *where, *NAMES)
        chaos.clients.append(process)
        await process.heard("begun")
        return process

    workers = await chaos.start_workers(WORKERS, far.url, **WORKER)
    for name in NAMES:
        await until(lambda name=name: adapters.publish(name), FINISH_S, f"a version of adapter {name}")
    faults = Faults(chaos, near, far, workers, [await begin(number) for number in range(TRAINERS)], begin)
    hands = [asyncio.create_task(faults.go_on(random.Random(chaos.rng.random()))) for _ in range(HANDS)]
    publishing = asyncio.create_task(adapters.go_on(faults.enough))
    tasks = [*hands, publishing]
    await asyncio.wait(tasks, timeout=60 * chaos.minutes, return_when=asyncio.FIRST_EXCEPTION)
    faults.enough.set()
    await asyncio.gather(*hands)
    async with asyncio.timeout(FINISH_S):
        await publishing
    chaos.terms = replace(chaos.terms, adapters=frozenset(adapters.given))
    chaos.notes |= {"faults": sum(faults.count.values()), "faults_by_kind": dict(faults.count)}
    chaos.notes |= {"adapter_versions": len(adapters.given), "adapter_versions_committed": adapters.count}
    for trainer in faults.clients:
        trainer.signal(signal.SIGTERM)
    codes = [await trainer.ended(FINISH_S) for trainer in faults.clients]
    chaos.expect(set(codes) == {0}, f"exit codes of the trainers: {codes}")
    for process in chaos.clients:
        for trouble in process.all("trouble"):
            chaos.expect(False, trouble)
