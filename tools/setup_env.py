"""Make .venv ready: everything the tests, the checks and the demo need. Standard library only; `make setup` runs it.

Safe to run again at any time: up to date it returns at once, after a failure it goes on where it stopped. Without a GPU
the exact pinned set in requirements/ is installed; with one (nvidia-smi works) SGLang and the torch it wants. Set
ROLLOUTMQ_SETUP=cpu or gpu to decide otherwise. pip's own configuration (PIP_* variables, pip.conf) applies as always.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "setup-stamp"
LOG = VENV / "setup.log"
PIP = "pip==26.3"
TORCH_CPU = "torch==2.13.0"
# Compiling everything takes minutes and little of it is ever imported; see try_it.
INSTALL = [str(PYTHON), "-m", "pip", "install", "-q", "--no-input", "--no-compile", "--disable-pip-version-check"]
BEGAN = time.monotonic()


def say(text: str) -> None:
    print(f"[setup {time.monotonic() - BEGAN:4.0f} s] {text}", flush=True)


def fail(text: str) -> None:
    sys.exit(f"setup: {text}")


def check_python() -> None:
    if not (3, 11) <= sys.version_info[:2] < (3, 13):
        fail(
            f"Python 3.11 or 3.12 is needed, {sys.executable} is {sys.version.split()[0]}. "
            "Name another one: make setup PYTHON=/path/to/python3.11"
        )
    try:
        import ensurepip  # noqa: F401, PLC0415
        import venv  # noqa: F401, PLC0415
    except ImportError:
        major, minor = sys.version_info[:2]
        fail(
            f"{sys.executable} comes without venv. On Debian and Ubuntu: apt-get install python{major}.{minor}-venv; "
            "or name a complete one: make setup PYTHON=/path/to/python3.11"
        )


def has_gpu() -> bool:
    wanted = os.environ.get("ROLLOUTMQ_SETUP", "")
    if wanted not in ("", "cpu", "gpu"):
        fail(f"ROLLOUTMQ_SETUP={wanted}: must be cpu or gpu")
    if wanted:
        return wanted == "gpu"
    tool = shutil.which("nvidia-smi")
    return tool is not None and subprocess.run([tool, "-L"], capture_output=True, check=False).returncode == 0


def key(gpu: bool) -> str:
    """Changes with whatever the environment is made from, the checkout's place included: the install points there."""
    digest = hashlib.sha256(f"{sys.version_info[:2]} gpu={gpu} {ROOT}".encode())
    for name in ("pyproject.toml", "requirements/engine-cpu.txt", "requirements/dev.txt", "tools/setup_env.py"):
        digest.update((ROOT / name).read_bytes())
    return digest.hexdigest()


def venv_runs() -> bool:
    """Whether .venv is there, works, and is of the Python that runs this script."""
    show = "import sys, pip; print(sys.version_info[:2])"
    try:
        shown = subprocess.run([str(PYTHON), "-c", show], capture_output=True, text=True, check=False).stdout
    except OSError:
        return False
    return shown.strip() == str(sys.version_info[:2])


def lock_out_others() -> int:
    """Two makes at once: the second waits, then finds everything done. Returns the descriptor that holds the lock."""
    lock = os.open(ROOT / "pyproject.toml", os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        say("another setup is at work here, waiting for it")
        fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


def install(lock: int, step: str, what: str, *arguments: str) -> None:
    """One pip step; its output goes to the log, whose end is shown when the step fails.

    If an earlier run was cut off amid this step, packages may be half unpacked: they are installed afresh.
    """
    started = VENV / f"setup-started-{step}"
    cut_off = started.exists()
    command = [*INSTALL, *(["--force-reinstall"] if cut_off else []), *arguments]
    started.touch()
    say(f"installing {what}" + (" afresh: an earlier run was cut off here" if cut_off else ""))
    with LOG.open("a") as log:
        print(f"\n== {what}: {' '.join(command)}", file=log, flush=True)
        # pip inherits the lock: where only this script is killed, the next one waits until that pip is through.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=ROOT, pass_fds=[lock]
        )  # fmt: skip
        while True:
            try:
                code = process.wait(15)
                break
            except subprocess.TimeoutExpired:
                say(f"installing {what} ...")
    if code >= 0:  # also after pip's own failure: it fetches everything before it touches anything
        started.unlink()
    if code:
        tail = "\n".join(LOG.read_text(errors="replace").splitlines()[-25:])
        fail(f"installing {what} failed (status {code}). The end of {LOG}:\n{tail}\nRun it again to go on from here.")


def try_it() -> None:
    """Let a tiny model answer through the pool: shows that the set-up works, and leaves the bytecode of just what an
    engine imports, thousands of files that every engine process would compile again where
    PYTHONDONTWRITEBYTECODE is set."""
    say("trying it: a tiny model answers through Redis and SGLang")
    bench = ["engine", "--prompts", "4", "--max-running", "4"]
    bench += ["--max-new-tokens", "4", "--rounds", "1", "--json"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    with LOG.open("a") as log:
        command = [str(PYTHON), "-m", "benchmarks", *bench]
        code = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=ROOT, env=environment, check=False
        ).returncode
    if code:
        fail(f"the tiny model did not answer (status {code}); see the end of {LOG}")


def main() -> None:
    check_python()
    lock = lock_out_others()
    gpu = has_gpu()
    wanted = key(gpu)
    if venv_runs() and STAMP.exists() and STAMP.read_text() == wanted:
        return
    if not venv_runs():
        say(f"creating .venv with Python {sys.version.split()[0]}")
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(VENV)], check=True)
    STAMP.unlink(missing_ok=True)
    install(lock, "pip", "pip", "--upgrade", PIP)
    if gpu:
        install(lock, "gpu", "SGLang, torch and the development tools (several GB)", "-e", ".[dev,sglang]")
    else:
        install(lock, "torch", "torch", TORCH_CPU)
        pinned = ["-r", "requirements/engine-cpu.txt", "-r", "requirements/dev.txt"]
        install(lock, "pinned", "SGLang for CPU and the development tools", "--no-deps", *pinned)
        install(lock, "editable", "rolloutmq itself, editable", "--no-deps", "--no-build-isolation", "-e", ".")
    # mypy does not follow the finder of an editable install; this link on MYPYPATH gives it the package by its name.
    link = VENV / "src" / "rolloutmq"
    link.parent.mkdir(exist_ok=True)
    if not link.is_symlink():
        link.symlink_to("../..")
    if not gpu:  # which kernels fit a tiny model on a GPU is SGLang's business, and that host's
        try_it()
    STAMP.write_text(wanted)
    say("ready: .venv")


if __name__ == "__main__":
    main()
