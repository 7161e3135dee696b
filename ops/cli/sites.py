"""Where `rolloutmq scale` and `rolloutmq up` have their workers: on this host, or as jobs of Slurm."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from ..scale import Means, Site

ENDS_S = 60.0
"""Seconds beyond its drain budget in which a worker that was told to leave has ended its engine, and itself."""
ANSWERS_S = 60.0

Logs = Annotated[Path | None, typer.Option(help="Folder for the workers' logs; default: a temporary one.")]
On = Annotated[
    Literal["host", "slurm"], typer.Option("--on", help="Where workers run: on this host, or as Slurm's jobs.")
]
Template = Annotated[
    Path | None, typer.Option(help="With --on slurm: the batch script of a worker, see deploy/slurm/worker.sbatch.")
]


@dataclass(frozen=True, slots=True)
class Workers:
    """What was said of workers. flags: of `rolloutmq worker`. leave_s: in which one ends that is told to.
    template: None for this host."""

    flags: Sequence[str]
    leave_s: float
    template: Path | None

    def means(self, folder: Path, redis: str, pool: str, **more: float) -> Means:
        """folder: for the logs of this host's workers."""
        from ..scale import Means

        return Means(self.site(folder, redis, pool), leave_s=self.leave_s, **more)

    def site(self, folder: Path, redis: str, pool: str) -> Site:
        """Where they run."""
        from ..scale import Slurm, ThisHost

        # In the environment, where the URL's password is not in the list of processes.
        environment = {"ROLLOUTMQ_REDIS": redis, "ROLLOUTMQ_POOL": pool}
        if self.template is None:
            command = [sys.executable, "-m", "rolloutmq.ops.entry", "worker", *self.flags]
            return ThisHost(command, environment, folder)
        # Pools of one name may be in several Redis; a password is no part of which one it is.
        where = hashlib.sha256(redis.rpartition("@")[2].encode()).hexdigest()[:6]
        return Slurm(self.template.absolute(), self.flags, environment, f"rolloutmq-{pool}-{where}")


def workers_of(flags: Sequence[str], redis: str, pool: str, most: int, *, on: str, template: Path | None) -> Workers:
    """Raises what `rolloutmq worker` would raise for these flags, before any is started; and ConfigError without
    Slurm, or without its batch script."""
    from ...messages.errors import ConfigError
    from ...worker.main import check_model
    from ..config import load_settings
    from .main import load

    context = load("worker").make_context("worker", [*flags, "--redis", redis, "--pool", pool])
    settings = load_settings(context.params["config"], context=context)
    drain_s = settings.worker().drain_s
    if settings.worker().metrics_port and most > 1:
        raise ConfigError(f"metrics_port={settings.worker().metrics_port}: 0, so that each worker takes a free one")
    if on == "host":
        if template is not None:
            raise typer.BadParameter("--template is for --on slurm.")
        check_model(settings.engine().model)
        return Workers(flags, drain_s + ENDS_S, None)
    if template is None or not template.is_file():
        raise typer.BadParameter(f"--on slurm needs --template FILE, a batch script; got {template}.")
    # Slurm kills what has not ended KillWait after its signal. Half of it is left for handing back, and for the engine.
    drain_s = min(drain_s, _kill_wait_s() / 2)
    return Workers([*flags, "--drain", f"{drain_s:g}"], drain_s + ENDS_S, template)


def _kill_wait_s() -> float:
    from ...messages.errors import ConfigError

    if not all(map(shutil.which, ("sbatch", "squeue", "scancel", "scontrol"))):
        raise ConfigError("--on slurm: Slurm's commands sbatch, squeue, scancel and scontrol are not on PATH here")
    command = ["scontrol", "show", "config"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=ANSWERS_S, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        why = getattr(error, "stderr", None) or error
        raise ConfigError(f"--on slurm: its controller does not answer: {why}") from None
    found = re.search(r"^KillWait\s*=\s*(\d+)", told, re.MULTILINE)
    return float(found[1]) if found else 30.0


def entries(gpus: str, on: str) -> list[str]:
    """What --gpus names."""
    if gpus and on != "host":
        raise typer.BadParameter("--gpus is for this host; with --on slurm the batch script asks for GPUs.")
    return [one.strip() for one in gpus.split(",")] if gpus else []


@contextmanager
def folder_of(logs: Path | None) -> Iterator[Path]:
    """The folder of the workers' logs. A temporary one is deleted in the end."""
    if logs is None:
        with tempfile.TemporaryDirectory(prefix="rolloutmq-workers-") as folder:
            yield Path(folder)
        return
    from ..files import check_out

    check_out("--logs", logs, folder=True)
    logs.mkdir(parents=True, exist_ok=True)
    yield logs
