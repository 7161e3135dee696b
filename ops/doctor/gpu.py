"""Findings about GPUs and their driver, from nvidia-smi; torch is not loaded for them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess

from .finding import Finding

FIELDS = "index,name,memory.total,memory.used,ecc.errors.uncorrected.volatile.total"
ANSWER_S = 30.0
IN_USE = 0.1
SLOWER = ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE")


def gpu_findings() -> tuple[bool, list[Finding]]:
    """Whether there are GPUs that work, and the findings."""
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return False, [Finding("gpu", "ok", "none: nvidia-smi is not there. An engine would run on the CPU")]
    try:
        listed = _run(smi, f"--query-gpu={FIELDS}", "--format=csv,noheader,nounits")
        driver = re.search(r"Driver Version: *(\S+).*CUDA Version: *(\S+)", _run(smi))
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "output", "") or str(error)
        advice = "Load the driver, or restart the host after an update of it (containers: start with --gpus)."
        return False, [Finding("gpu", "problem", f"nvidia-smi fails: {' '.join(said.split())[:200]}", advice)]
    gpus = [_gpu([part.strip() for part in line.split(",")]) for line in listed.splitlines() if line.strip()]
    found = f"{driver[1]}, for CUDA up to {driver[2]}" if driver else "of no known version"
    return True, [*gpus, Finding("driver", "ok", found), *_nccl_settings()]


def _run(*command: str) -> str:
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=ANSWER_S,
        check=True,
    )
    return done.stdout


def _gpu(values: list[str]) -> Finding:
    index, name, total, used, errors = (values + [""] * 5)[:5]
    found = f"{index}: {name}, {used} of {total} MiB in use"
    if errors.isdigit() and int(errors):
        advice = "Take it out of service and reset it: its memory changes what is written into it."
        return Finding("gpu", "problem", f"{found}, {errors} uncorrected memory errors", advice)
    if total.isdigit() and used.isdigit() and int(used) > IN_USE * int(total):
        return Finding(
            "gpu", "warning", found, "If no worker runs here, end what holds its memory: SGLang takes the free part."
        )
    return Finding("gpu", "ok", found)


def _nccl_settings() -> list[Finding]:
    slow = [name for name in SLOWER if os.environ.get(name, "0") not in {"", "0"}]
    if not slow:
        return []
    return [
        Finding(
            "nccl settings",
            "warning",
            f"{', '.join(slow)} set",
            "Unset them if the hardware works: weights travel slower.",
        )
    ]
