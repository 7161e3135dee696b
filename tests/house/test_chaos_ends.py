"""How worker processes of the chaos suite may end."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path

from chaos.habits import Options
from chaos.processes import WorkerProcess
from support.pools.pool import eventually


async def test_sigterm_ends_only_a_worker_that_was_told_before_it_had_joined(redis_db: str, tmp_path: Path) -> None:
    early, other = [await WorkerProcess.launch(redis_db, tmp_path / "log", Options()) for _ in range(2)]
    try:
        code = await early.drain(20)
        assert (code, early.may_end(code), early.all("joined")) == (-signal.SIGTERM, True, [])
        await other.joined()
        other.signal(signal.SIGTERM)
        await other.heard("generated")

        def told_again() -> bool:  # as by another hand, while its interpreter ends
            with contextlib.suppress(ProcessLookupError):
                other.signal(signal.SIGTERM)
            return not other.alive

        await eventually(told_again)
        assert await other.drain(20) == 0
        assert not other.may_end(-signal.SIGTERM)
        assert other.may_end(-signal.SIGKILL)
    finally:
        for worker in (early, other):
            await worker.kill()
