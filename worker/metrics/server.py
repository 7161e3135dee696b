"""A small HTTP server in a thread of its own, so that it answers whatever the event loop does."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer, ThreadingMixIn
from typing import Any

from prometheus_client import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector, CollectorRegistry

from ...messages.errors import ConfigError

log = logging.getLogger(__name__)
SLOW_CLIENT_S = 10.0
"""Seconds without a byte from a client, or without one taken, after which it is cut off."""
MOST, LONGEST_S = 32, 60.0
"""Connections at once, and seconds of each. What is beyond is cut off, the oldest first, when another one comes."""
Probe = Callable[[], bool]


class _Collected(Collector):
    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self._collect = collect

    def collect(self) -> Iterable[Metric]:
        return list(self._collect())

    def describe(self) -> Iterable[Metric]:
        return ()  # otherwise the registry collects once at the start, to learn the names


class MetricsServer:
    """Serves /metrics, and under each probe's path 200 or 503. A context manager.

    collect(): the metrics; called in other threads. probes: path -> whether all is well. port: 0 takes a free one.
    Raises ConfigError if the port cannot be had.
    """

    def __init__(
        self, host: str, port: int, collect: Callable[[], Iterable[Metric]], probes: Mapping[str, Probe] | None = None
    ) -> None:
        registry = CollectorRegistry()
        registry.register(_Collected(collect))
        handler = type("Handler", (_Handler,), {"registry": registry, "probes": dict(probes or {})})
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._server = type("Server", (_Server,), {"address_family": family})((host, port), handler)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"metrics: {host}:{port} cannot be listened on: {error}") from None
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)

    def __enter__(self) -> MetricsServer:
        self._thread.start()
        log.info("metrics on port %d", self.port)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingMixIn, TCPServer):
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = 32

    def __init__(self, *told: Any) -> None:
        self._open: dict[Any, float] = {}  # connections, the oldest first: when they came
        self._turn = threading.Lock()
        super().__init__(*told)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._turn:
            now = self._open[request] = time.monotonic()
            excess = len(self._open) - MOST
            old = [one for at, (one, came) in enumerate(self._open.items()) if at < excess or now - came > LONGEST_S]
        for one in old:  # its own thread closes it
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._turn:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("a request for metrics failed", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    timeout = SLOW_CLIENT_S
    registry: CollectorRegistry
    probes: Mapping[str, Probe]

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path in self.probes:
            fine = self.probes[path]()
            self._answer(200 if fine else 503, b"yes\n" if fine else b"no\n")
        elif path == "/metrics":
            encode, kind = choose_encoder(self.headers.get("Accept", ""))
            self._answer(200, encode(self.registry), kind)
        else:
            paths = " ".join(["/metrics", *self.probes])
            self._answer(404, f"there are: {paths}\n".encode())

    def _answer(self, status: int, body: bytes, kind: str = "text/plain; charset=utf-8") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        log.debug(format, *args)
