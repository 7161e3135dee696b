"""A process with the gateway's server in front of a small application, for the fuzzer: prints its port."""

from __future__ import annotations

import asyncio
import logging

from support.http import Held, application

from rolloutmq.ops.gateway import HttpLimits, HttpServer

LIMITS = HttpLimits(header_s=0.2, body_s=0.2, request_s=5.0, keep_alive_s=1, max_body_bytes=1 << 20, drain_notice_s=0.0)

if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    server = HttpServer(application(Held()), "127.0.0.1", 0, limits=LIMITS)
    print(server.port, flush=True)
    asyncio.run(server.serve())
