"""A real Slurm on this host: one controller, several nodes. Debian's slurmctld, slurmd, slurm-client and munge.

Jobs of the partition `spot` have to give way to those of `urgent`, `GRACE_S` after they were told; `KILL_S` after that
they are killed.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from support.pools.served import port
from support.redis.deployments import soon

GRACE_S = 8
KILL_S = 10
needs_slurm = pytest.mark.skipif(
    os.geteuid() != 0 or not all(map(shutil.which, ("slurmctld", "slurmd", "srun", "munged"))),
    reason="Slurm and munge are not installed, or this is not root, who starts Slurm's daemons",
)
CONFIG = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
KillWait={kill_s}
SchedulerParameters=batch_sched_delay=0,sched_min_interval=200000,bf_interval=1,requeue_delay=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}
PartitionName=spot Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace_s} MaxTime=INFINITE
PartitionName=urgent Nodes=ALL PriorityTier=10 PreemptMode=OFF MaxTime=INFINITE
"""


class Cluster:
    """config: its slurm.conf. folder: where jobs run, and have their output. environment: for Slurm's commands."""

    def __init__(self, folder: Path, config: Path) -> None:
        self.folder, self.config, self.environment = folder, config, {"SLURM_CONF": str(config)}

    def ask(self, *command: str) -> str:
        """What a command of Slurm prints."""
        environment = {**os.environ, **self.environment}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=self.folder)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def jobs(self, *states: str, name: str = "") -> list[str]:
        """Ids of the jobs in these states, or of all that Slurm has not forgotten."""
        named = [f"--name={name}"] if name else []
        return self.ask("squeue", "--noheader", f"--states={','.join(states) or 'all'}", "--format=%i", *named).split()

    def template(self, text: str) -> Path:
        """A batch script whose worker says what `text` is, in shell."""
        file = self.folder / "worker.sbatch"
        file.write_text(
            "#!/bin/bash\n#SBATCH --ntasks=1\n#SBATCH --requeue\n#SBATCH --open-mode=append\n"
            f"#SBATCH --chdir={self.folder}\n#SBATCH --output={self.folder}/worker-%j.log\n{text}\n"
        )
        return file

    def urgent(self, nodes: int, seconds: float) -> None:
        """Work that takes nodes from others, for so long."""
        script = f"#!/bin/bash\nsleep {seconds}\n"
        told = ("--partition=urgent", f"--array=1-{nodes}", "--output=/dev/null", f"--wrap={script}")
        self.ask("sbatch", *told)


@contextmanager
def cluster(folder: Path, nodes: int = 4) -> Iterator[Cluster]:
    """A cluster with so many nodes of one processor each, until the block is left."""
    host, config = socket.gethostname(), folder / "slurm.conf"
    for inner in ("state", "jobs"):
        (folder / inner).mkdir()
    lines = (f"NodeName=n{i} NodeHostname={host} NodeAddr=127.0.0.1 Port={port()} CPUs=1" for i in range(nodes))
    config.write_text(
        CONFIG.format(host=host, port=port(), folder=folder, kill_s=KILL_S, grace_s=GRACE_S, nodes="\n".join(lines))
    )
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    munge = [f"--{what}-file={folder}/munge.{what}" for what in ("key", "pid", "log", "seed")]
    found = Cluster(folder / "jobs", config)
    with ExitStack() as stack:
        stack.enter_context(
            _daemon(folder, "munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *munge)
        )
        soon((folder / "munge.socket").exists, 30, "munge listens")
        stack.enter_context(_daemon(folder, "slurmctld", "-D", "-f", str(config)))
        for i in range(nodes):
            stack.enter_context(_daemon(folder, "slurmd", "-D", "-f", str(config), "-N", f"n{i}"))
        idle = ("sinfo", "--noheader", "--partition=spot", "--states=idle", "--format=%D")

        def ready() -> bool:
            with suppress(AssertionError):  # nobody answers yet
                return found.ask(*idle).strip() == str(nodes)
            return False

        soon(ready, 60, "all nodes are idle")
        yield found
        found.ask("scancel", "--user=root", "--full", "--signal=KILL")
        soon(lambda: not found.jobs("RUNNING", "COMPLETING"), 60, "all jobs have ended")


@contextmanager
def _daemon(folder: Path, *command: str) -> Iterator[None]:
    with (folder / f"{command[0]}.log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        yield
    finally:
        process.terminate()
        process.wait(60)
