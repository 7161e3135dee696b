"""A scaler of one scripted worker as a process, to be killed: `python -m support.pools.scaler_process FOLDER`."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from support.pools import scripted_worker

from rolloutmq.messages import connect
from rolloutmq.ops.metrics import PoolWatch
from rolloutmq.ops.scale import Means, Scaler, ScalerLock, ScaleSettings, ThisHost, places


async def scale(url: str, folder: Path) -> None:
    means = Means(ThisHost(scripted_worker.command(lease_s=30.0), scripted_worker.environment(url), folder))
    async with connect(url) as redis:
        lock = ScalerLock(redis, "default")
        await lock.take()
        await Scaler(ScaleSettings(least=1), means, places(1), PoolWatch(redis, "default"), lock).run()


if __name__ == "__main__":
    asyncio.run(scale(os.environ["ROLLOUTMQ_REDIS"], Path(sys.argv[1])))
