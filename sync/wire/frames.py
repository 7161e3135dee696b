"""What is said on a connection between whoever has a version and whoever wants it: small maps, and buckets as they are.

A frame is a letter, the length of what follows (8 bytes, big-endian), and that. Who waits for a bucket that its holder
is itself waiting for hears WAIT several times a second. So silence means that the holder is stopped or unreachable.
"""

from __future__ import annotations

import contextlib
import math
import socket
import struct
import threading
import time
from collections.abc import Iterable
from typing import Any

import msgpack

from ...messages.errors import MalformedMessage, TransferTimeout
from ..transfer import parts_of

ASK, ANSWER, WAIT, REFUSE, BUCKET = b"?", b"=", b".", b"!", b"#"
STALL_S = 0.25
"""Seconds without a byte after which a holder counts as stopped. Another one is asked then."""
BEAT_S = 0.05
"""Seconds between two WAITs."""
CONNECT_S = 1.0
SEND_S = 2.0
"""Seconds without progress after which a receiver counts as stopped, and is dropped."""
MOST_ASKED = 64 << 10
MOST_ANSWERED = 256 << 20
SLICE = 8 << 20
BUFFERED = 4 << 20
_HEAD = struct.Struct("!cQ")
Map = dict[str, Any]


class Talk:
    """One connection. One thread hears, any thread speaks. Every call raises OSError if the other end is gone."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._turn = threading.Lock()
        with contextlib.suppress(OSError):  # a unix socket of a test has neither
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def say(self, kind: bytes, told: Map | str = "") -> None:
        """Send a frame. told: a map for ASK and ANSWER, the reason for REFUSE, nothing for WAIT."""
        payload: bytes = msgpack.packb(told) if isinstance(told, dict) else told.encode()[:MOST_ASKED]
        with self._turn:
            self._sock.sendall(_HEAD.pack(kind, len(payload)) + payload)

    def say_bucket(self, nbytes: int, pieces: Iterable[memoryview]) -> None:
        """Send a bucket. pieces: its bytes. When it is withdrawn the connection closes before the next piece."""
        with self._turn:
            self._sock.sendall(_HEAD.pack(BUCKET, nbytes))
            for piece in pieces:
                self._sock.sendall(piece)

    def hear(self, most: int, timeout_s: float | None = None) -> tuple[bytes, Map | str]:
        """Receive a frame that is no bucket. Raises TimeoutError after `timeout_s` without a byte.

        Raises MalformedMessage for a frame above `most` bytes or one that is no map.
        """
        kind, size = self.hear_head(timeout_s)
        if size > most or kind == BUCKET:
            raise MalformedMessage(f"a frame {kind!r} of {size} bytes, at most {most} are expected")
        raw = bytearray(size)
        self.fill(memoryview(raw), timeout_s)
        if kind not in (ASK, ANSWER):
            return kind, raw.decode(errors="replace")
        try:
            told = msgpack.unpackb(raw)
        except (ValueError, msgpack.UnpackException) as error:
            raise MalformedMessage(f"a frame {kind!r} cannot be read: {error}") from None
        if not isinstance(told, dict) or not all(isinstance(key, str) and _plain(it) for key, it in told.items()):
            raise MalformedMessage(f"a frame {kind!r} holds no map of texts, numbers, bytes and lists of texts")
        return kind, told

    def hear_head(self, timeout_s: float | None = None) -> tuple[bytes, int]:
        """Receive a frame's letter and the length of what follows."""
        head = bytearray(_HEAD.size)
        self.fill(memoryview(head), timeout_s)
        return _HEAD.unpack(head)

    def fill(self, raw: memoryview, timeout_s: float | None = None, deadline: float = math.inf) -> None:
        """Receive exactly so many bytes. Raises TimeoutError after `timeout_s` without one, and at `deadline`."""
        self._sock.settimeout(timeout_s)
        while raw:
            if time.monotonic() >= deadline:
                raise TimeoutError
            got = self._sock.recv_into(raw, min(len(raw), SLICE))
            if not got:
                raise ConnectionResetError("the other end has closed the connection")
            raw = raw[got:]

    def close(self) -> None:
        """End it, also for a thread that hears or speaks at this moment."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


def _plain(value: object) -> bool:
    if isinstance(value, list):
        return all(isinstance(each, str) for each in value)
    return value is None or isinstance(value, str | bytes | int | float)


def call(address: str, timeout_s: float = CONNECT_S) -> Talk:
    """Connect to "host:port". Raises TransferTimeout if nobody answers there."""
    host, port = parts_of(address)
    why: Exception | None = None
    try:
        found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except (OSError, ValueError, OverflowError) as error:
        raise TransferTimeout(f"nobody answers at {address}: {error}") from None
    for family, kind, proto, _, where in found:
        sock = socket.socket(family, kind, proto)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFERED)  # before the window is agreed upon
            sock.settimeout(timeout_s)
            sock.connect(where)
        except (OSError, OverflowError) as error:
            why = error
            sock.close()
        else:
            return Talk(sock)
    raise TransferTimeout(f"nobody answers at {address}: {why}")
