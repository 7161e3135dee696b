"""Worker and client processes, seen from the driver."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from asyncio.subprocess import PIPE, Process
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from .habits import Options

START_S = 30.0


class Spoken:
    """A process of this suite that says on stdout what happens to it; its stderr goes to a file."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.news: list[dict[str, Any]] = []
        self._more = asyncio.Event()
        self._listening = asyncio.create_task(self._listen())

    @classmethod
    async def start(cls, module: str, log: Path, *arguments: str) -> Self:
        with log.open("ab") as errors:
            command = [sys.executable, "-m", f"chaos.{module}", *arguments]
            process = await asyncio.create_subprocess_exec(
                *command, stdout=PIPE, stderr=errors, start_new_session=True, cwd=Path(__file__).parents[1]
            )
        return cls(process)

    async def _listen(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            self.news.append(json.loads(line))
            self._more.set()
        self._more.set()

    async def heard(self, key: str, count: int = 1, timeout: float = START_S) -> Any:
        """The `count`-th value said under this key."""
        async with asyncio.timeout(timeout):
            while len(found := self.all(key)) < count:
                if self._listening.done():
                    raise AssertionError(f"process {self.pid} ended without saying {key!r} {count} times: {self.news}")
                self._more.clear()
                await self._more.wait()
        return found[count - 1]

    def all(self, key: str) -> list[Any]:
        """Everything said under this key."""
        return [line[key] for line in self.news if key in line]

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process.returncode is None

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def kill(self) -> None:
        """SIGKILL; returns when it is gone."""
        if self.alive:
            self.process.kill()
        await self.process.wait()
        await self._listening

    async def ended(self, timeout: float) -> int:
        """Its exit code, once it has ended."""
        async with asyncio.timeout(timeout):
            await asyncio.shield(self._listening)  # whoever waits no longer does not end it
            return await self.process.wait()


class WorkerProcess(Spoken):
    """A worker with the scripted engine. told_early: whether it was told to drain before it had joined."""

    def __init__(self, process: Process) -> None:
        super().__init__(process)
        self.told_early: bool | None = None

    @classmethod
    async def launch(cls, url: str, log: Path, options: Options) -> Self:
        return await cls.start("worker_process", log, url, json.dumps(asdict(options)))

    async def joined(self, count: int = 1) -> str:
        """The id of its `count`-th incarnation."""
        return str(await self.heard("joined", count))

    @property
    def id(self) -> str:
        """Of its incarnation now."""
        return str(self.all("joined")[-1])

    @property
    def refused(self) -> int:
        """Publishes that the script refused."""
        return sum(self.all("fenced"))

    def signal(self, number: signal.Signals) -> None:
        """Send it. SIGTERM is sent once: when the loop is closed, nothing listens to another one any more."""
        if number == signal.SIGTERM:
            if self.told_early is not None:
                return
            self.told_early = not self.all("joined")
        super().signal(number)

    def may_end(self, code: int) -> bool:
        """Whether this is an exit code that it may have."""
        # Before it has joined, SIGTERM may find a process that does not listen yet.
        return code in {0, -signal.SIGKILL} or (code == -signal.SIGTERM and self.told_early is True)

    async def drain(self, timeout: float) -> int:
        """SIGTERM; its exit code."""
        if self.alive:
            self.signal(signal.SIGTERM)
        return await self.ended(timeout)


class MatrixProcess(Spoken):
    """A trainer of the kill matrix; see matrix_process.py."""


class TrainerProcess(Spoken):
    """A trainer with a feed and checkpoints; see trainer_process.py."""


class GatewayProcess(Spoken):
    """A gateway; see gateway_process.py."""

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self.all("port")[0])


class BlockingProcess(Spoken):
    """A plain loop with the blocking client; see blocking_process.py."""


class ClientProcess(Spoken):
    """A trainer's client that submits jobs and takes all there is."""

    @classmethod
    async def launch(cls, log: Path, *arguments: str, options: Options | None = None) -> Self:
        """arguments: as client_process.py takes them, without the options."""
        return await cls.start("client_process", log, *arguments, json.dumps(asdict(options or Options())))
