"""`python -m fuzz.http_process`: the gateway's server in front of a small application; it prints its port.

With a file's name it serves what that OpenAPI page says, with the URL of a Redis a gateway of the pool there.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from pathlib import Path
from typing import Any

from support.http import Held, application
from support.openapi_app import page_application

from rolloutmq.ops.gateway import Gateway, HttpLimits, HttpServer, Settings
from rolloutmq.ops.gateway import application as gateway_application

LIMITS = HttpLimits(
    header_s=0.2, body_s=0.2, request_s=30.0, keep_alive_s=1, max_body_bytes=1 << 20, drain_notice_s=0.0
)


def app(served: str = "", tokenizer: str | None = None) -> Any:
    """What is behind the server. served: see above."""
    if not served:
        return application(Held())
    if not served.startswith("redis://"):
        return page_application(json.loads(Path(served).read_text()))
    return gateway_application(Gateway(Settings(served, name="m", tokenizer=tokenizer, defaults={"max_tokens": 4})))


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    server = HttpServer(app(*sys.argv[1:]), "127.0.0.1", 0, limits=LIMITS)
    print(server.port, flush=True)
    asyncio.run(server.serve())
