"""The clouds' metadata services on loopback, as they are documented: tokens, headers, 404, long polls, events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web

Trouble = Callable[[web.Request], Awaitable[web.StreamResponse]]
NAME = "workers_3"
"""The name of the machine, on Azure."""


class PlayedCloud:
    """All three services on one port. troubles: what the next requests get instead of an answer, in order.

    noticed: whether the machine will be taken away. asked: how many requests there were for the notice itself.
    """

    def __init__(self) -> None:
        self.url = ""
        self.asked = self.tokens = 0
        self.troubles: list[Trouble] = []
        self.events: list[object] = []
        self._changed = asyncio.Event()
        self._least = 1

    @property
    def noticed(self) -> bool:
        return self._changed.is_set()

    def notice(self) -> None:
        self.events.append({"EventType": "Preempt", "Resources": [NAME], "NotBefore": "Mon, 19 Sep 2016 18:29:47 GMT"})
        self._changed.set()

    def expire_tokens(self) -> None:
        """Every token that was given so far is refused from now on."""
        self._least = self.tokens + 1

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if self.troubles:
            return await self.troubles.pop(0)(request)
        if request.path.startswith("/latest/"):
            return self._aws(request)
        if request.path == "/computeMetadata/v1/instance/preempted":
            return await self._gcp(request)
        if request.path.startswith("/metadata/"):
            return self._azure(request)
        return web.Response(status=404)

    def _aws(self, request: web.Request) -> web.Response:
        if request.path == "/latest/api/token":
            if request.method != "PUT" or not request.headers.get("X-aws-ec2-metadata-token-ttl-seconds", "").isdigit():
                return web.Response(status=400)
            self.tokens += 1
            return web.Response(text=f"token-{self.tokens}")
        if request.path != "/latest/meta-data/spot/instance-action":
            return web.Response(status=404)
        _, _, number = request.headers.get("X-aws-ec2-metadata-token", "").partition("token-")
        if not number or int(number) < self._least:
            return web.Response(status=401)
        self.asked += 1
        if not self.noticed:
            return web.Response(status=404)
        return web.json_response({"action": "terminate", "time": "2017-09-18T08:22:00Z"})

    async def _gcp(self, request: web.Request) -> web.Response:
        if request.headers.get("Metadata-Flavor") != "Google":
            return web.Response(status=403)
        self.asked += 1
        etag = "true-etag" if self.noticed else "false-etag"
        if request.query.get("wait_for_change") == "true" and request.query.get("last_etag") == etag:
            await asyncio.wait({asyncio.ensure_future(self._changed.wait())}, timeout=int(request.query["timeout_sec"]))
        headers = {"Metadata-Flavor": "Google", "ETag": "true-etag" if self.noticed else "false-etag"}
        return web.Response(text="TRUE" if self.noticed else "FALSE", headers=headers)

    def _azure(self, request: web.Request) -> web.Response:
        if request.headers.get("Metadata") != "true" or "api-version" not in request.query:
            return web.Response(status=400)
        if request.path == "/metadata/instance/compute/name":
            return web.Response(text=NAME)
        if request.path != "/metadata/scheduledevents":
            return web.Response(status=404)
        self.asked += 1
        return web.json_response({"DocumentIncarnation": self.asked, "Events": self.events})


@asynccontextmanager
async def played_cloud() -> AsyncIterator[PlayedCloud]:
    """Its service on a free port of loopback, as long as the block lasts."""
    cloud = PlayedCloud()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", cloud.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        cloud.url = f"http://{host}:{port}"
        yield cloud
    finally:
        await runner.cleanup()
