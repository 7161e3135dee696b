"""The command line, whose `scale` and `up` start scripted workers: `python -m support.pools.scaled_cli scale --max 2 …`

The flags of workers are checked as always, but for the model.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from support.pools import scripted_worker

from rolloutmq.ops.cli import scale
from rolloutmq.ops.cli.sites import Workers, workers_of
from rolloutmq.ops.entry import main
from rolloutmq.ops.scale import ThisHost


class Scripted(Workers):
    def site(self, folder: Path, redis: str, pool: str) -> ThisHost:
        environment = {"ROLLOUTMQ_REDIS": redis, "ROLLOUTMQ_POOL": pool}
        return ThisHost(scripted_worker.command(lease_s=5.0, max_running=4), environment, folder)


def _scripted(flags: Sequence[str], redis: str, pool: str, most: int, *, on: str, template: Path | None) -> Workers:
    if on == "host":
        return Scripted(flags, 90.0, None)
    return workers_of(flags, redis, pool, most, on=on, template=template)  # its batch script starts what it likes


if __name__ == "__main__":
    scale.workers_of = _scripted
    sys.argv[0] = "rolloutmq"
    main()
