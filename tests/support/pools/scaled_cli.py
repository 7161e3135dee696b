"""The command line, whose `scale` and `up` start scripted workers: `python -m support.pools.scaled_cli scale --max 2 …`

The flags of workers are checked as always, but for the model.
"""

from __future__ import annotations

import sys
from typing import Any

from support.pools import scripted_worker

from rolloutmq.ops.cli import scale
from rolloutmq.ops.entry import main


def _scripted(*_: Any) -> tuple[list[str], float]:
    return scripted_worker.command(lease_s=5.0, max_running=4), 90.0


if __name__ == "__main__":
    scale._worker_command = _scripted
    sys.argv[0] = "rolloutmq"
    main()
