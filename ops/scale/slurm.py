"""Workers as jobs of Slurm, from a batch script that the user owns.

What Slurm does is at https://slurm.schedmd.com: sbatch, squeue, scancel, and preempt for the signals of a pre-emption.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ...messages.model import WorkerStatus
from .member import Member
from .places import Place
from .process import last_lines

log = logging.getLogger(__name__)
COMMAND_S = 60.0
"""Seconds in which a command of Slurm has to answer."""
AGAIN_S = 10.0
"""Seconds after which a job that was told to leave, and is still there, is told again: its step may just have begun."""
COLUMNS = "JobID:20,State:20,RestartCnt:8,Reason:64"
RUNS = {"RUNNING", "COMPLETING", "SIGNALING", "STAGE_OUT", "SUSPENDED", "STOPPED", "RESIZING"}
ENDED = {"COMPLETED", "CANCELLED", "PREEMPTED", "NODE_FAIL", "TIMEOUT", "DEADLINE", "REVOKED"}
BROKEN = {"FAILED", "BOOT_FAIL", "OUT_OF_MEMORY"}
TAKEN = {"PREEMPTED", "NODE_FAIL"}


class SlurmJob(Member):
    """A worker in a job of its own. Slurm may take it away at any time, and may start the same job again later."""

    def __init__(self, place: Place, job: str) -> None:
        super().__init__(place, f"worker-{place.number} (Slurm job {job})", math.inf)
        self.job, self.state, self.reason, self.killed = job, "PENDING", "", False
        self.told_at = -math.inf
        self._restarts = 0
        self._output: Path | None = None

    def has(self, status: WorkerStatus) -> bool:
        return status.slurm_job == f"{self.job}.{self._restarts}"

    @property
    def failed(self) -> bool:
        """A job that had served was taken away; one that never did, and was not taken away, cannot work."""
        return self.state in BROKEN or (self.served_at is None and self.state not in TAKEN)

    def kill(self) -> None:
        self.killed, self.told_at = True, -math.inf

    def becomes(self, state: str, restarts: int, reason: str) -> None:
        """Take over what Slurm says of it."""
        if restarts > self._restarts:
            log.info("%s was taken away, and waits to start again", self.name)
            self._restarts, self.served_at, self.started_at, self.told_at = restarts, None, math.inf, -math.inf
        self.state = state
        if state in RUNS:
            self.started_at = min(self.started_at, time.monotonic())
        elif state in ENDED | BROKEN:
            self.ended.set_result(None)
        elif reason not in {self.reason, "None"}:
            log.info("%s waits in Slurm's queue: %s", self.name, reason)
        self.reason = reason

    def ended_as(self, told: str) -> None:
        """Take over the end of `scontrol show job`: where its output is."""
        if found := re.search(r"\bStdOut=(\S+)", told):
            self._output = Path(found[1])

    def last_lines(self) -> str:
        return last_lines(self._output) if self._output is not None else ""

    def how_it_ended(self) -> str:
        where = f", its output is in {self._output}" if self._output is not None else ""
        return f"ended as {self.state}{where}"


class Slurm:
    """template: the batch script, which gets `flags` as its arguments and starts a worker with `srun`. environment:
    beside this process' own; Slurm keeps it with the job. name: of the jobs, which nothing else of this user has.
    """

    def __init__(self, template: Path, flags: Sequence[str], environment: Mapping[str, str], name: str) -> None:
        self._template, self._flags, self._environment, self._name = template, flags, environment, name
        self._jobs: dict[str, SlurmJob] = {}

    async def start(self, place: Place, leave_s: float) -> SlurmJob:
        """Submit a job. It stays in Slurm if this process dies; the next scaler takes it over."""
        told = ("--parsable", f"--job-name={self._name}", "--export=ALL", str(self._template), *self._flags)
        job = SlurmJob(place, (await self._slurm("sbatch", *told)).strip().split(";")[0])
        log.info("%s is submitted", job.name)
        self._jobs[job.job] = job
        return job

    async def look(self, free: Sequence[Place]) -> list[Member]:
        """Two commands, however many jobs there are."""
        await self._tell()
        rows = await self._rows()
        left = [name for name, row in rows.items() if name not in self._jobs and row[0] not in ENDED | BROKEN]
        found = {name: SlurmJob(place, name) for place, name in zip(free, left, strict=False)}
        for job in found.values():
            log.info("%s was there already", job.name)
        self._jobs |= found
        for name, job in list(self._jobs.items()):
            job.becomes(*rows.get(name, ("COMPLETED", 0, "")))  # Slurm forgets a job minutes after its end
            if job.ended.done():
                del self._jobs[name]
                job.ended_as(await self._slurm("scontrol", "--oneliner", "show", "job", name, fails=True))
        return [*found.values()]

    async def _rows(self) -> dict[str, tuple[str, int, str]]:
        """State, restarts and reason of each job of this name."""
        told = ("--noheader", "--me", f"--name={self._name}", "--states=all", f"--Format={COLUMNS}")
        lines = [line.split(None, 3) for line in (await self._slurm("squeue", *told)).splitlines() if line.strip()]
        return {job: (state, int(restarts), "".join(reason).strip()) for job, state, restarts, *reason in lines}

    async def _tell(self) -> None:
        """Signal the jobs that are to leave; a job that has not started is cancelled."""
        now = time.monotonic()
        due = [it for it in self._jobs.values() if (it.leaving or it.killed) and now - it.told_at > AGAIN_S]
        drained, killed = [it.job for it in due if not it.killed], [it.job for it in due if it.killed]
        if drained:
            await self._slurm("scancel", "--quiet", "--state=PENDING", *drained, fails=True)
            # To the steps alone: a batch script that is ended by it would take its steps with it.
            await self._slurm("scancel", "--quiet", "--state=RUNNING", "--signal=TERM", *drained, fails=True)
        if killed:
            await self._slurm("scancel", "--quiet", *killed, fails=True)
        for job in due:
            job.told_at = now

    async def _slurm(self, *command: str, fails: bool = False) -> str:
        """What a command prints. Raises OSError if it fails. fails: it may, as when the job has just ended."""
        pipe = asyncio.subprocess.PIPE
        environment = {**os.environ, **self._environment}
        process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe, env=environment)
        try:
            out, err = await asyncio.wait_for(process.communicate(), COMMAND_S)
        except TimeoutError:
            raise OSError(f"{command[0]} has not answered in {COMMAND_S:g} s") from None
        finally:
            if process.returncode is None:
                process.kill()
        if process.returncode and not fails:
            raise OSError(f"{command[0]}: {err.decode(errors='replace').strip()}")
        return out.decode(errors="replace")
