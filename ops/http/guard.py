"""What each request passes on its way to the application: its size, its deadline, the drain, and a line in the log."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.responses import JSONResponse

from .protocol import HttpLimits
from .refused import Refused, refusal

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

log = logging.getLogger(__name__)
access = logging.getLogger(f"{__package__}.access")
HEALTH = "/health"
DRAINING = JSONResponse({"ready": False, "reason": "draining"}, 503)
SHOWN = 200
"""Characters of a path in the log. Never its query, headers or body: these may hold keys and prompts."""
KEY = re.compile(rb"^/t/[^/]*")
"""The part of a path that is a key."""


class Exchange:
    """One request and its answer, as far as they have come.

    ended: it was answered here. Nothing follows, and what the application raises then is of no account.
    """

    def __init__(self, receive: Receive, send: Send, max_body_bytes: int) -> None:
        self._receive, self._send, self._most = receive, send, max_body_bytes
        self.received = self.sent = self.status = 0
        self._streams_events = self.ended = False

    async def receive(self) -> Message:
        """The application's. It sees a body that is too long as a client that has hung up."""
        if self.ended:
            return {"type": "http.disconnect"}
        message = await self._receive()
        self.received += len(message.get("body", b""))
        if self.received > self._most:
            await self.refuse(Refused(413, "request_too_large", f"More than {self._most} bytes of body."))
            return {"type": "http.disconnect"}
        return message

    async def send(self, message: Message) -> None:
        """The application's."""
        if self.ended:
            return
        if message["type"] == "http.response.start":
            self.status = message["status"]
            kinds = [value for name, value in message.get("headers", ()) if name.lower() == b"content-type"]
            self._streams_events = any(value.startswith(b"text/event-stream") for value in kinds)
        self.sent += len(message.get("body", b""))
        await self._send(message)

    async def refuse(self, refused: Refused) -> None:
        """Answer with this error: also in the middle of a stream of events, but not of another answer."""
        if self.ended:
            return
        if not self.status:
            await refused({"type": "http"}, self.receive, self.send)
        elif self._streams_events:
            await self.send({"type": "http.response.body", "body": b"data: " + refused.response.body + b"\n\n"})
        self.ended = True


class Guard:
    """ASGI middleware, the outermost. A Refused that the application raises becomes its answer.

    The application finds in `scope["state"]["deadline"]` when it will be stopped, by the loop's clock, and may put
    `tenant` there, a name for the log.
    """

    def __init__(self, app: App, limits: HttpLimits) -> None:
        self._app, self._limits = app, limits
        self.draining = False

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """ASGI's call."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = Exchange(receive, send, self._limits.max_body_bytes)
        began = time.monotonic()
        try:
            await self._pass(scope, exchange)
        finally:
            state, client = scope.get("state", {}), scope.get("client")
            path = KEY.sub(rb"/t/-", scope.get("raw_path", b""))[:SHOWN].decode("ascii", "backslashreplace")
            access.info(
                '%s %s "%s %s" %d, %d B in, %d B out, %.0f ms', client[0] if client else "-", state.get("tenant", "-"),
                scope["method"], path, exchange.status, exchange.received, exchange.sent,
                (time.monotonic() - began) * 1000,
            )  # fmt: skip

    async def _pass(self, scope: Message, exchange: Exchange) -> None:
        deadline = asyncio.timeout(self._limits.request_s)
        try:
            async with deadline:
                scope.setdefault("state", {})["deadline"] = deadline.when()
                self._check(scope)
                draining = self.draining and scope["path"].endswith(HEALTH)
                await (DRAINING if draining else self._app)(scope, exchange.receive, exchange.send)
        except Refused as refused:
            await exchange.refuse(refused)
        except asyncio.CancelledError:  # uvicorn's, at the end of a drain
            text = "This gateway ends, and the time for requests to end is over."
            await exchange.refuse(Refused(503, "shutting_down", text, retry_after_s=1))
        except TimeoutError as error:
            if not deadline.expired():
                await self._fail(scope, exchange, error)
            text = f"No complete answer within {self._limits.request_s:g} s, the deadline of a request."
            await exchange.refuse(Refused(504, "timeout", text))
        except Exception as error:
            if not exchange.ended:
                await self._fail(scope, exchange, error)

    def _check(self, scope: Message) -> None:
        headers = scope["headers"]
        size = sum(len(name) + len(value) + 4 for name, value in headers)
        size += len(scope.get("raw_path") or b"") + len(scope.get("query_string", b""))
        if size > self._limits.max_header_bytes or len(headers) > self._limits.max_headers:
            allowed = f"{self._limits.max_headers} headers and {self._limits.max_header_bytes} bytes"
            raise Refused(431, "header_too_large", f"The request's head is larger than {allowed}.")
        length = next((value for name, value in headers if name == b"content-length"), b"0")
        if length.isdigit() and (len(length) > 15 or int(length) > self._limits.max_body_bytes):
            raise Refused(413, "request_too_large", f"More than {self._limits.max_body_bytes} bytes of body.")

    async def _fail(self, scope: Message, exchange: Exchange, error: Exception) -> None:
        log.error("%s %s failed", scope["method"], scope["path"][:SHOWN], exc_info=error)
        await exchange.refuse(await refusal(None, error))
