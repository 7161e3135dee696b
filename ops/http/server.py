"""An ASGI application served by uvicorn: limits, TLS, and a drain that balancers see before it begins."""

from __future__ import annotations

import asyncio
import signal
import socket
import ssl
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from uvicorn import Server

from ...messages import ConfigError
from .guard import App, Guard
from .protocol import READ_AHEAD, HttpLimits, LimitedConfig, LimitedProtocol

BACKLOG = 2048


@dataclass(frozen=True, slots=True)
class Tls:
    """Files in PEM. client_ca: only clients with a certificate of this authority are served."""

    certfile: Path
    keyfile: Path
    client_ca: Path | None = None

    def context(self) -> ssl.SSLContext:
        """TLS 1.2 or newer. Raises ConfigError, which names the file."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            # A key with a password would be asked for on the terminal.
            context.load_cert_chain(self.certfile, self.keyfile, password=lambda: "")
        except (OSError, ValueError) as error:
            raise ConfigError(f"TLS: certfile={self.certfile}, keyfile={self.keyfile}: {error}") from None
        try:
            if self.client_ca is not None:
                context.verify_mode = ssl.CERT_REQUIRED
                context.load_verify_locations(self.client_ca)
        except (OSError, ValueError) as error:
            raise ConfigError(f"TLS: client_ca={self.client_ca}: {error}") from None
        return context


class HttpServer(Server):
    """Listens from the moment it is made. `await serve()` in the main thread ends after SIGTERM or SIGINT.

    SIGTERM: /health answers 503 for `drain_notice_s` seconds, so that no balancer sends requests any more; then nobody
    can connect, idle connections close, and requests have `drain_s` seconds to end. SIGINT leaves out the notice, and a
    second signal all waiting. Who is cut off is told so, and then the application ends.
    port: on which it listens. Raises ConfigError for an address or files that cannot be used.
    """

    def __init__(
        self, app: App, host: str, port: int, *, limits: HttpLimits | None = None, tls: Tls | None = None
    ) -> None:
        limits = limits or HttpLimits()
        context = tls.context() if tls else None
        self.guard = Guard(app, limits)
        self._socket = _listen(host, port)
        self.port: int = self._socket.getsockname()[1]
        self._notice_s, self._leave_at, self._at_once = limits.drain_notice_s, float("inf"), asyncio.Event()
        config = LimitedConfig(
            self.guard,
            limits,
            http=LimitedProtocol,
            ws="none",
            interface="asgi3",
            lifespan="on",
            log_config=None,
            access_log=False,  # it would have queries in it
            server_header=False,
            proxy_headers=False,  # anybody could say who they are
            timeout_keep_alive=limits.keep_alive_s,
            timeout_graceful_shutdown=limits.drain_s,
            h11_max_incomplete_event_size=limits.max_header_bytes + READ_AHEAD,
            ssl_context_factory=(lambda *_: context) if context else None,
        )
        super().__init__(config)

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Raises SystemExit if the application does not start."""
        await super().serve(sockets or [self._socket])

    def drain(self, notice_s: float | None = None) -> None:
        """Begin to leave, as SIGTERM does."""
        self.guard.draining = True
        notice_s = self._notice_s if notice_s is None else notice_s
        self._leave_at = min(self._leave_at, time.monotonic() + notice_s)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal. Unlike uvicorn's, this one does not kill the process with it once everything is done."""
        if self.guard.draining:
            self._at_once.set()
        self.drain(self._notice_s if sig == signal.SIGTERM else 0.0)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let requests end, and the application after them; also after a second signal, unlike uvicorn's."""
        impatient = asyncio.create_task(self._cut_off())
        await super().shutdown(sockets)
        impatient.cancel()

    async def _cut_off(self) -> None:
        await self._at_once.wait()
        for task in self.server_state.tasks:
            task.cancel()
        await asyncio.sleep(0.1)  # the guard tells the clients
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: whether to leave."""
        self.should_exit = self.should_exit or self._at_once.is_set() or time.monotonic() >= self._leave_at
        return await super().on_tick(counter)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listening = socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error}") from None
    # Connections inherit it. asyncio sets it for others; without it an answer's body waits 40 ms behind its head.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening
