"""Everything at once, for minutes."""

from __future__ import annotations

import asyncio
import random
import signal
from collections import Counter
from dataclasses import replace

from ..context import Chaos
from ..faults import WORKER, Faults
from ..processes import MatrixProcess, Spoken
from ..scenario import scenario

TRAINERS, WORKERS, HANDS = 2, 3, 2
FINISH_S = 120.0


@scenario("kill_matrix", lease_s=1.5, slow=True, lasts=True, finish_s=300.0, config={"appendfsync": "always"})
async def matrix(chaos: Chaos) -> None:
    """Two trainers that ask for every kind of job in every way, three workers, and two hands that break things at
    random: workers, trainers, the server, the networks of both sides. Then peace; and everything has ended."""
    chaos.terms = replace(chaos.terms, giving_up=frozenset(f"trainer{number}.batches" for number in range(TRAINERS)))
    near, far = await chaos.proxy(), await chaos.proxy()
    begun: Counter[int] = Counter()

    async def begin(number: int) -> Spoken:
        begun[number] += 1
        run = f"trainer{number}-{begun[number]}"
        where = (near.url, f"trainer{number}", str(chaos.rng.random()), str(chaos.directory / "journal"), run)
        process = await MatrixProcess.start("matrix_process", chaos.directory / f"{run}.log", *where)
        chaos.clients.append(process)
        await process.heard("begun")
        return process

    workers = await chaos.start_workers(WORKERS, far.url, **WORKER)
    faults = Faults(chaos, near, far, workers, [await begin(number) for number in range(TRAINERS)], begin)
    hands = [asyncio.create_task(faults.go_on(random.Random(chaos.rng.random()))) for _ in range(HANDS)]
    await asyncio.wait(hands, timeout=60 * chaos.minutes, return_when=asyncio.FIRST_EXCEPTION)
    faults.enough.set()
    await asyncio.gather(*hands)
    chaos.notes |= {"faults": sum(faults.count.values()), "faults_by_kind": dict(faults.count)}
    for trainer in faults.clients:
        trainer.signal(signal.SIGTERM)
    codes = [await trainer.ended(FINISH_S) for trainer in faults.clients]
    chaos.expect(set(codes) == {0}, f"exit codes of the trainers: {codes}")
    for process in chaos.clients:
        for trouble in process.all("trouble"):
            chaos.expect(False, trouble)
