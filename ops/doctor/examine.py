"""All checks, one after the other. A check that cannot be made is a finding too."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .engine import engine_findings
from .finding import Finding
from .gpu import gpu_findings
from .host import host_findings
from .redis_server import redis_findings


async def examine(redis_url: str, pool: str, folders: Sequence[Path] = (), reach: Sequence[str] = ()) -> list[Finding]:
    """Look at Redis and at this host. It changes nothing.

    folders: further places whose free space counts. reach: host:port of rendezvous stores that this host must reach.
    Raises ConfigError or InvalidField for a URL, a pool's name or an address that cannot be used.
    """
    has_gpu, gpus = gpu_findings()
    worker_host, engine = engine_findings(has_gpu=has_gpu)
    return [
        *await redis_findings(redis_url, pool),
        *host_findings(redis_url, folders, reach, worker_host=worker_host, has_gpu=has_gpu),
        *gpus,
        *engine,
    ]
