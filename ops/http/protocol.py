"""HTTP connections that nobody can hold open by being slow, or fill by sending more than is read.

uvicorn bounds neither the time of a request's head and body, nor that of an answer which is not read, nor the number of
connections. h11 is its strict parser, and the only one here.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Any

import h11
from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol

from .refused import Refused

access = logging.getLogger(f"{__package__}.access")
READ_AHEAD = 1 << 20
"""Bytes that may be read at a time, besides what is allowed."""


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """What a client may send, and how long everything may take, in bytes and seconds.

    header_s: until a request's head is there. body_s: until its body is there. write_s: in which a client must read
    some of its answer. request_s: of a whole request. keep_alive_s: in which the next request must begin; longer than a
    balancer's, or it sends requests into connections that close. drain_notice_s: after SIGTERM, in which /health says
    so and everything else goes on. drain_s: after that, in which requests may end.
    """

    max_body_bytes: int = 32 << 20
    max_header_bytes: int = 32 << 10
    max_headers: int = 100
    max_connections: int = 4096
    header_s: float = 10.0
    body_s: float = 60.0
    write_s: float = 60.0
    request_s: float = 3600.0
    keep_alive_s: int = 75
    drain_notice_s: float = 5.0
    drain_s: int = 60


class LimitedConfig(Config):
    """uvicorn's settings, and the limits."""

    def __init__(self, app: Any, limits: HttpLimits, **settings: Any) -> None:
        super().__init__(app, **settings)
        self.limits = limits


class LimitedProtocol(H11Protocol):
    """One connection. Whoever breaks a limit is told (400, 408, 413, 431, 503) where that can be, and cut off."""

    config: LimitedConfig

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._limits = self.config.limits
        self._waits_for: Any = None  # h11's state of a request that is not here yet, or None
        self._taken = 0  # bytes since it is in that state
        self._slow: asyncio.TimerHandle | None = None
        self._cut: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._limits.max_connections:
            self._refuse(Refused(503, "overloaded", "Too many connections.", retry_after_s=1))
        else:
            self._wait_for(h11.IDLE)

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait_for(None)
        self._unset_keepalive_if_required()
        if self._cut is not None:
            self._cut.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        try:
            super().data_received(data)
        except h11.LocalProtocolError:  # it broke the rules in the middle of its answer
            self.transport.abort()
            return
        state = self.conn.their_state
        self._taken += len(data)
        if self.transport.is_closing() or state not in {h11.IDLE, h11.SEND_BODY}:
            self._wait_for(None)
        elif state is not self._waits_for:
            self._wait_for(state)
            self._taken = len(data)
        elif state is h11.IDLE and self._taken > self._limits.max_header_bytes:
            most = self._limits.max_header_bytes
            self._refuse(Refused(431, "header_too_large", f"The request's head is larger than {most} bytes."))
        elif state is h11.SEND_BODY and self._taken > 2 * self._limits.max_body_bytes + READ_AHEAD:
            # More than is ever read, in tiny chunks, or after the answer.
            self._refuse(Refused(413, "request_too_large", f"More than {self._limits.max_body_bytes} bytes of body."))

    def _wait_for(self, state: Any) -> None:
        """Begin to wait for the rest of a head or of a body, or stop waiting."""
        if self._slow is not None:
            self._slow.cancel()
        self._waits_for, self._taken, self._slow = state, 0, None
        if state is not None:
            seconds = self._limits.header_s if state is h11.IDLE else self._limits.body_s
            self._slow = self.loop.call_later(seconds, self._too_slow)

    def _too_slow(self) -> None:
        if self._waits_for is h11.IDLE and not self._taken:
            self.timeout_keep_alive_handler()  # it never sent anything, so nobody waits for an answer
            return
        head = self._waits_for is h11.IDLE
        what, seconds = ("head", self._limits.header_s) if head else ("body", self._limits.body_s)
        self._refuse(Refused(408, "timeout", f"The request's {what} was not here within {seconds:g} s."))

    def _refuse(self, refused: Refused) -> None:
        """Answer beside the application, if it has not begun to, and close."""
        self._wait_for(None)
        if self.transport.is_closing():
            return
        access.info("%s - refused: %d %s", self.client[0] if self.client else "-", refused.status, refused)
        running = self.cycle is not None and not self.cycle.response_complete
        if not (running and self.cycle.response_started) and self.conn.our_state in {h11.IDLE, h11.SEND_RESPONSE}:
            answer = refused.response
            lines = [b"HTTP/1.1 %d Refused" % refused.status, b"connection: close"]
            lines += [b": ".join(header) for header in answer.raw_headers]
            self.transport.write(b"\r\n".join(lines) + b"\r\n\r\n" + answer.body)
        if running:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._close()

    def _close(self) -> None:
        """Close once everything is sent, and anyway after a while."""
        self.transport.close()
        if self._cut is None:
            self._cut = self.loop.call_later(self._limits.write_s, self.transport.abort)

    def send_400_response(self, msg: str) -> None:
        self._refuse(Refused(400, "malformed_request", msg))

    def on_response_complete(self) -> None:
        try:
            super().on_response_complete()
        except h11.LocalProtocolError:
            self.transport.abort()
        if self.transport.is_closing():
            self._close()

    def shutdown(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self._close()
        else:
            self.cycle.keep_alive = False

    def timeout_keep_alive_handler(self) -> None:
        self._close()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._cut is None:
            self._cut = self.loop.call_later(self._limits.write_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._cut is not None and not self.transport.is_closing():
            self._cut.cancel()
            self._cut = None
