"""HTTP servers in processes of their own, gateways among them, and a balancer before several."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
from support.engines.forking import Forked, command_line
from support.redis.deployments import free_port

from rolloutmq.ops.redis import embedded

START_S = 60.0


def port() -> int:
    """One that nobody listens on."""
    return free_port(embedded.PORTS)


class Served:
    """A server's process. `url` answers when `wait_ready` returns. What it prints goes to `log`."""

    def __init__(self, process: Forked | subprocess.Popen[bytes], url: str, log: Path) -> None:
        self.process, self.url, self.log = process, url, log

    def wait_ready(self, path: str = "/health") -> None:
        deadline = time.monotonic() + START_S
        while True:
            with suppress(httpx.TransportError):
                if httpx.get(self.url + path).status_code == 200:
                    return
            assert self.process.poll() is None, f"it ended with {self.process.returncode}:\n{self.text()}"
            assert time.monotonic() < deadline, f"{self.url} does not answer:\n{self.text()}"
            time.sleep(0.02)  # between two looks

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def kill(self) -> None:
        """At once, without a word."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(10)


def start_gateway(redis_url: str, log: Path, *options: str, at: int | None = None) -> Served:
    """A `rolloutmq gateway` that begins to start. at: its port."""
    at = at or port()
    log.write_text("")
    command = ["gateway", "--redis", redis_url, "--host", "127.0.0.1", "--port", str(at), *options]
    return Served(Forked(command_line, *command, log=log), f"http://127.0.0.1:{at}", log)


@contextmanager
def gateway(redis_url: str, log: Path, *options: str) -> Iterator[Served]:
    """A gateway that answers."""
    server = start_gateway(redis_url, log, *options)
    try:
        server.wait_ready()
        yield server
    finally:
        server.kill()


@contextmanager
def served(command: Sequence[str], at: int, log: Path, ready: str = "/health") -> Iterator[Served]:
    """A server of others that answers. at: the port that the command names. ready: a path that answers 200."""
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    server = Served(process, f"http://127.0.0.1:{at}", log)
    try:
        server.wait_ready(ready)
        yield server
    finally:
        server.kill()


class Balancer:
    """Passes each connection on to the next server that takes it, as a balancer of TCP does."""

    def __init__(self, ports: Sequence[int]) -> None:
        self._ports, self._turn = list(ports), 0
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._pass_on, args=[client], daemon=True).start()

    def _pass_on(self, client: socket.socket) -> None:
        for _ in self._ports:
            self._turn += 1
            with suppress(OSError):
                server = socket.create_connection(("127.0.0.1", self._ports[self._turn % len(self._ports)]))
                threading.Thread(target=_copy, args=[client, server], daemon=True).start()
                _copy(server, client)
                return
        client.close()


def _copy(source: socket.socket, target: socket.socket) -> None:
    """Until one of them ends, which ends the other."""
    with suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    for side in (source, target):
        with suppress(OSError):
            side.shutdown(socket.SHUT_RDWR)
