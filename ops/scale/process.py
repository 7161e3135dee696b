"""One worker process of a scaler."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from .places import Place

LEAVE = Path(__file__).with_name("leave_with_parent.py")
LAST_LINES = 20
LAST_BYTES = 16384


def leaving_with_this(command: Sequence[str], leave_s: float) -> list[str]:
    """The command, made to leave within `leave_s` seconds when this process dies."""
    return [sys.executable, "-I", "-S", str(LEAVE), str(os.getpid()), str(leave_s), *command]


class WorkerProcess:
    """A worker that this process started. Its output goes to a file.

    served_at: when it was first seen to serve, on time.monotonic; None before. leaving: it was told to drain.
    leave_by: when it has to have ended, on time.monotonic.
    """

    def __init__(self, place: Place, process: asyncio.subprocess.Process, log: Path) -> None:
        self.place, self.log = place, log
        self.started_at = time.monotonic()
        self.served_at: float | None = None
        self.leaving = False
        self.leave_by = math.inf
        self.too_late = False
        self._process = process
        self.ended = asyncio.create_task(process.wait())
        """Ends with the process."""

    @classmethod
    async def start(
        cls, place: Place, command: Sequence[str], environment: Mapping[str, str], folder: Path, leave_s: float
    ) -> WorkerProcess:
        """Start it in a session of its own: Ctrl-C in a terminal is for the scaler alone. Raises OSError.

        leave_s: seconds in which it has to leave if this process dies.
        """
        log = folder / f"worker-{place.number}.log"
        own = {"CUDA_VISIBLE_DEVICES": place.gpus} if place.gpus else {}
        with log.open("wb") as out:
            process = await asyncio.create_subprocess_exec(
                *leaving_with_this(command, leave_s), stdin=asyncio.subprocess.DEVNULL, stdout=out, stderr=out,
                env={**os.environ, **environment, **own}, start_new_session=True,
            )  # fmt: skip
        return cls(place, process, log)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Negative for a signal; None while it runs."""
        return self._process.returncode

    def drain(self, within_s: float) -> None:
        """Have it finish or hand back what it holds, and leave. Each call can only bring `leave_by` nearer."""
        self.leaving = True
        self.leave_by = min(self.leave_by, time.monotonic() + within_s)
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it, and what it has started, at once; others get its jobs when its lease is over."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            self._process.send_signal(number)

    def last_lines(self) -> str:
        """The end of its output."""
        with suppress(OSError), self.log.open("rb") as log:
            log.seek(max(0, self.log.stat().st_size - LAST_BYTES))
            lines = log.read().decode(errors="replace").splitlines()
            return "\n".join(lines[-LAST_LINES:])
        return ""

    def how_it_ended(self) -> str:
        """Its exit code in words."""
        code = self.exit_code
        if code is not None and code < 0:
            return f"was ended by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"
