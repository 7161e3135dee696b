"""`python -m fuzz.http_process`: the gateway's server in front of a small application; it prints its port.

With a file's name it serves what that OpenAPI page says.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from pathlib import Path

from support.http import Held, application
from support.openapi_app import page_application

from rolloutmq.ops.gateway import HttpLimits, HttpServer

LIMITS = HttpLimits(header_s=0.2, body_s=0.2, request_s=5.0, keep_alive_s=1, max_body_bytes=1 << 20, drain_notice_s=0.0)

if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    app = page_application(json.loads(Path(sys.argv[1]).read_text())) if sys.argv[1:] else application(Held())
    server = HttpServer(app, "127.0.0.1", 0, limits=LIMITS)
    print(server.port, flush=True)
    asyncio.run(server.serve())
