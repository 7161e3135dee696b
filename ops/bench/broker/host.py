"""The host and the versions of a measurement."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import redis

from .environments import installed, pins

OWN = ("redis", "hiredis", "msgpack", "pydantic", "numpy")


def describe_host(url: str, peers: list[str]) -> dict[str, Any]:
    """CPU, memory, load before the run, Python, Redis, and the versions of all systems."""
    with redis.Redis.from_url(url) as client:
        server = client.info("server")
    return {
        "cpu": _first("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gb": round(int((_first("/proc/meminfo", "MemTotal") or "0 kB").split()[0]) / 1e6, 1),
        "system": f"{platform.system()} {'.'.join(platform.release().split('.')[:2])}",
        "load_before": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "redis": str(server["redis_version"]),
        "packages": {name: installed(name) for name in OWN},
        "peers": {peer: _heads(peer) for peer in peers},
    }


def _heads(peer: str) -> dict[str, str]:
    """The versions that matter of a peer's pins."""
    shown = {"rq", "arq", "taskiq", "taskiq-redis", "redis", "hiredis"}
    return {name: version for name, version in pins(peer).items() if name in shown}


def _first(path: str, field: str) -> str | None:
    try:
        for line in Path(path).read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == field:
                return value.strip()
    except OSError:
        pass
    return None
