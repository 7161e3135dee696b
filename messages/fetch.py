"""Fetches a URL whose author is not trusted.

A URL in a data set can name a host that only this machine reaches: a metadata service, a database, localhost. So every
host is resolved first, and refused unless all of its addresses are public. The connection goes to the address that was
checked. Each redirect is a new URL with the same checks. Hosts that the caller names may be private. No proxy is used.
"""

from __future__ import annotations

import http.client
import io
import ipaddress
import socket
import ssl
import time
from collections.abc import Collection
from typing import Any
from urllib.parse import urljoin, urlsplit

from .errors import InvalidField

MAX_REDIRECTS = 3
CHUNK = 1 << 16


def fetch(url: str, *, max_bytes: int, timeout_s: float = 10.0, hosts: Collection[str] | None = None) -> bytes:
    """The body behind `url`, of `max_bytes` at most, within `timeout_s` seconds. It blocks: do not call it in a loop.

    hosts: the only hosts that may be asked, private or not. None allows every public host.
    Raises InvalidField, which names the URL, for any failure.
    """
    deadline = time.monotonic() + timeout_s
    asked = url
    for _ in range(MAX_REDIRECTS + 1):
        try:
            moved, body = _get(asked, max_bytes, deadline, hosts)
            if moved is None:
                return body
            asked = urljoin(asked, moved)
        except InvalidField:
            raise
        except (OSError, http.client.HTTPException, ValueError) as error:  # ValueError: it is no URL
            raise InvalidField("url", url, f"one that can be fetched: {type(error).__name__}: {error}") from error
    raise InvalidField("url", url, f"at most {MAX_REDIRECTS} redirects")


def _get(url: str, max_bytes: int, deadline: float, hosts: Collection[str] | None) -> tuple[str | None, bytes]:
    """The redirect's target and no body, or None and the body."""
    parts = urlsplit(url)
    try:
        host, port = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        host, port = None, 0
    if parts.scheme not in {"http", "https"} or not host:
        raise InvalidField("url", url, "http://HOST/… or https://HOST/…")
    if hosts is not None and host not in {name.lower() for name in hosts}:
        raise InvalidField("url", url, f"a host among {', '.join(sorted(hosts)) or 'none'}")
    connection = http.client.HTTPConnection(host, port, timeout=_left(deadline))
    # The library would resolve the name a second time, perhaps to another address.
    connected = _connect(url, host, port, deadline, public=hosts is None)
    try:
        if parts.scheme == "https":
            connected = ssl.create_default_context().wrap_socket(connected, server_hostname=host)
        connection.sock = _InTime(connected, deadline)
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        connection.request("GET", path, headers={"User-Agent": "rolloutmq", "Accept": "*/*"})
        answer = connection.getresponse()
        if answer.status in {301, 302, 303, 307, 308} and (moved := answer.headers.get("Location")):
            return moved, b""
        if answer.status != 200:
            raise InvalidField("url", url, f"one that answers 200, not {answer.status} {answer.reason}")
        body = bytearray()
        while chunk := answer.read1(CHUNK):
            body += chunk
            if len(body) > max_bytes:
                raise InvalidField("url", url, f"at most {max_bytes} bytes")
        return None, bytes(body)
    finally:
        connection.close()
        connected.close()


class _InTime:
    """The part of a socket that the library uses. It ends at the deadline, even if the server sends slowly."""

    def __init__(self, connected: socket.socket, deadline: float) -> None:
        self._connected, self._deadline = connected, deadline

    def sendall(self, data: bytes) -> None:
        self._connected.settimeout(_left(self._deadline))
        self._connected.sendall(data)

    def makefile(self, _mode: str) -> io.BufferedReader:
        return io.BufferedReader(_Reader(self._connected, self._deadline))

    def close(self) -> None:
        """Do nothing. The library closes the socket while it still reads. `_get` closes it at the end."""


class _Reader(io.RawIOBase):
    def __init__(self, connected: socket.socket, deadline: float) -> None:
        self._connected, self._deadline = connected, deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._connected.settimeout(_left(self._deadline))
        return self._connected.recv_into(buffer)


def _connect(url: str, host: str, port: int, deadline: float, *, public: bool) -> socket.socket:
    addresses = [str(found[4][0]) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    if public and (inside := [it for it in addresses if not ipaddress.ip_address(it.split("%")[0]).is_global]):
        raise InvalidField("url", url, f"a public host; {host} is {inside[0]}, which has to be allowed by name")
    return socket.create_connection((addresses[0], port), timeout=_left(deadline))


def _left(deadline: float) -> float:
    if (left := deadline - time.monotonic()) <= 0:
        raise TimeoutError("it took too long")
    return left
