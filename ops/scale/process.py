"""Workers as processes of this host."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ...messages.model import WorkerStatus
from .member import Member
from .places import Place

LEAVE = Path(__file__).with_name("leave_with_parent.py")
LAST_LINES = 20
LAST_BYTES = 16384


def leaving_with_this(command: Sequence[str], leave_s: float) -> list[str]:
    """The command, made to leave within `leave_s` seconds when this process dies."""
    return [sys.executable, "-I", "-S", str(LEAVE), str(os.getpid()), str(leave_s), *command]


def last_lines(log: Path) -> str:
    """The end of a worker's output; nothing if it cannot be read."""
    with suppress(OSError), log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - LAST_BYTES))
        return "\n".join(file.read().decode(errors="replace").splitlines()[-LAST_LINES:])
    return ""


class WorkerProcess(Member):
    """A worker that this process started. Its output goes to a file."""

    def __init__(self, place: Place, process: asyncio.subprocess.Process, log: Path) -> None:
        super().__init__(place, f"worker-{place.number}", time.monotonic())
        self._process, self._log, self._host = process, log, socket.gethostname()
        self.ended = asyncio.create_task(process.wait())

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Negative for a signal; None while it runs."""
        return self._process.returncode

    def has(self, status: WorkerStatus) -> bool:
        return (status.host, status.pid) == (self._host, self.pid)

    def drain(self, within_s: float) -> None:
        super().drain(within_s)
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it, and what it has started, at once; others get its jobs when its lease is over."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def last_lines(self) -> str:
        return last_lines(self._log)

    def how_it_ended(self) -> str:
        code = self.exit_code
        if code is not None and code < 0:
            return f"was ended by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"


@dataclass(frozen=True, slots=True)
class ThisHost:
    """command: of one worker; it joins the pool of the watch. environment: beside this process' own. folder: for the
    workers' logs."""

    command: Sequence[str]
    environment: Mapping[str, str]
    folder: Path

    async def start(self, place: Place, leave_s: float) -> WorkerProcess:
        """In a session of its own: Ctrl-C in a terminal is for the scaler alone."""
        log = self.folder / f"worker-{place.number}.log"
        own = {"CUDA_VISIBLE_DEVICES": place.gpus} if place.gpus else {}
        with log.open("wb") as out:
            process = await asyncio.create_subprocess_exec(
                *leaving_with_this(self.command, leave_s), stdin=asyncio.subprocess.DEVNULL, stdout=out, stderr=out,
                env={**os.environ, **self.environment, **own}, start_new_session=True,
            )  # fmt: skip
        return WorkerProcess(place, process, log)

    async def look(self, free: Sequence[Place]) -> list[Member]:
        """The kernel tells when a process ends, and workers leave with the scaler that has started them."""
        return []
