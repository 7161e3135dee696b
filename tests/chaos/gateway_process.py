"""A gateway as a process, which others take for dead sooner than usual.

    python -m chaos.gateway_process REDIS_URL [KEYS]

KEYS: the file of tenants; who sends no key is the tenant `default` of it.
On stdout a line of JSON each: {"port": where it listens}, {"client": id} for each client that it opens.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

from .worker_process import PR_SET_PDEATHSIG, tell

BEAT_S, ALIVE_S = 0.3, 1.5


def main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    from rolloutmq.ops.gateway import Gateway, HttpLimits, HttpServer, Settings, application, pool_gateway  # noqa: PLC0415
    from rolloutmq.ops.gateway.heir import Gateways  # noqa: PLC0415

    from .context import POOL  # noqa: PLC0415

    class Quick(Gateways):
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named, beat_s=BEAT_S, alive_s=ALIVE_S)

        async def join(self, tenant: str) -> str:
            client = await super().join(tenant)
            tell(client=client)
            return client

    pool_gateway.Gateways = Quick  # type: ignore[attr-defined]
    logging.basicConfig(level=logging.INFO, format=f"{os.getpid()} %(relativeCreated)d %(message)s", stream=sys.stderr)
    url, *keys = sys.argv[1:]
    tenants = {"keys": Path(keys[0]), "tenant": "default"} if keys else {}
    app = application(Gateway(Settings(url, [POOL], **tenants)))
    server = HttpServer(app, "127.0.0.1", 0, limits=HttpLimits(drain_notice_s=0.0, drain_s=20))
    tell(port=server.port)
    asyncio.run(server.serve())


if __name__ == "__main__":
    main()
