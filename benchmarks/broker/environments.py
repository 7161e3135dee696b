"""A Python environment for each peer of the queue benchmark."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from rolloutmq.messages.errors import ConfigError

from ..harness import installed
from .turn import System

PEERS = ("rq", "arq", "taskiq")
REQUIREMENTS = Path(__file__).resolve().parents[2] / "requirements"
CACHE = Path("out/bench-peers")
PEERS_PATH = str(Path(__file__).parents[1])
INSTALL_S = 600.0


def peer_systems(names: list[str], cache: Path = CACHE, say: Callable[[str], None] = print) -> list[System]:
    """Return the systems of these peers, with the windows that suit them. Raises ConfigError.

    Windows and polling intervals are the best of several that were tried. The differences were small.
    """
    systems: list[System] = []
    for name in names:
        python = _python(name, cache, say)
        module = f"peers.{name}_peer"
        if name == "rq":
            systems.append(System("rq", python, module, 2048, 32, "simple", PEERS_PATH))
            systems.append(System("rq_fork", python, module, 32, 16, "fork", PEERS_PATH))
        elif name == "arq":
            systems.append(System("arq", python, module, 500, 32, "", PEERS_PATH, 0.2))
        else:
            systems.append(System("taskiq_list", python, module, 200, 32, "list", PEERS_PATH, 0.02))
            systems.append(System("taskiq_stream", python, module, 200, 32, "stream", PEERS_PATH, 0.05))
    return systems


def pins(name: str) -> dict[str, str]:
    """Return the pinned versions of a peer: distribution -> version."""
    path = REQUIREMENTS / f"peers-{name}.txt"
    if not path.exists():
        raise ConfigError(f"{path} is missing: peers are measured from a checkout of the repository (or --peers none)")
    lines = [line.split("#")[0].strip() for line in path.read_text().splitlines() if ";" not in line]
    return dict(line.split("==") for line in lines if line)


def _python(name: str, cache: Path, say: Callable[[str], None]) -> str:
    """Return an interpreter with the pinned versions: this one if it has them, else one in a venv under `cache`."""
    wanted = pins(name)
    if all(installed(distribution) == version for distribution, version in wanted.items()):
        return sys.executable
    text = f"{sys.version_info[:2]}{sorted(wanted.items())}"
    place = cache.absolute() / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    python = place / "bin" / "python"
    if not (place / "ready").exists():
        say(f"making {place}")
        shutil.rmtree(place, ignore_errors=True)
        _run(name, [sys.executable, "-m", "venv", "--without-pip", str(place)])
        requirements = str(REQUIREMENTS / f"peers-{name}.txt")
        pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-input", "--no-deps"]
        _run(name, [*pip, "-r", requirements])
        (place / "ready").touch()
    return str(python)


def _run(name: str, command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=INSTALL_S)
        said = done.stderr.strip()[-800:]
    except subprocess.TimeoutExpired:
        said = f"not done within {INSTALL_S:g} s"
    else:
        if not done.returncode:
            return
    raise ConfigError(
        f"{name} could not be installed for the comparison, which needs a Python package index that pip can reach; "
        f"leave it out with --peers. {' '.join(command)}:\n{said}"
    )


def heads(peer: str) -> dict[str, str]:
    """Return the versions among a peer's pins that matter for its speed."""
    shown = {"rq", "arq", "taskiq", "taskiq-redis", "redis", "hiredis"}
    return {name: version for name, version in pins(peer).items() if name in shown}
