"""What comes over a line: frames of receivers to whoever offers a version, and frames of a sender to a receiver.

A case is the bytes that one end sends before it is gone. The other end runs in this thread, so that what it raises is
seen. Whoever else is on the line, or comes next, is served all the same.
"""

from __future__ import annotations

import contextlib
import math
import socket
import struct
import threading
import time
from collections.abc import Iterator
from random import Random
from typing import Any

import torch

from fuzz.mutator import mutated, mutated_bytes, pack
from rolloutmq.messages import encode
from rolloutmq.messages.errors import MalformedMessage, RolloutMQError, TransferTimeout
from rolloutmq.sync.packing import PackedWeights
from rolloutmq.sync.publish.hub import Hub
from rolloutmq.sync.tensors import Snapshot
from rolloutmq.sync.transfer import TransferOrder, VersionHolder
from rolloutmq.sync.wire import Brief, Lines, Place, Talk, fetch_manifest
from rolloutmq.sync.wire.frames import ANSWER, ASK, BUCKET, MOST_ANSWERED, REFUSE, WAIT
from rolloutmq.sync.wire.pull import SourceConnection

HEAD = struct.Struct("!cQ")
TOKEN = "0f" * 16
MOST_BYTES = 100_000
"""Of one case: as much as a socket holds while nobody reads."""
ADDRESSES = (
    *("", "x", ":1", "127.0.0.1:1", "[::1]:1", "a:b:c", "127.0.0.1:-1", "127.0.0.1:99999", "127.0.0.1\0:1"),
    *("127.0.0.1:" + "9" * 30, "é" * 200 + ":1", "x" * 70 + ":1"),
)
HOPELESS_S = 30.0
"""Longer than any case takes. Whoever waits so long waits for ever."""

JOIN = {"do": "join", "token": TOKEN, "worker": "w", "rank": 0, "ranks": 1, "gpu": "", "nccl": "", "cuda": False}
JOIN |= {"group": "", "address": "127.0.0.1:1"}
ASKED = (
    JOIN,
    {"do": "source", "token": TOKEN, "who": "w/0", "avoid": ["127.0.0.1:1"]},
    {"do": "done", "token": TOKEN, "who": "w/0"},
    {"token": TOKEN},
    {"token": TOKEN, "bucket": 0},
)
PLACE = {"way": "cell", "group": "cell-1", "number": "2", "rank": 1, "world": 2, "port": 1, "go": False}


def snapshot() -> Snapshot:
    return PackedWeights(3, [("w", torch.arange(40, dtype=torch.float32)), ("v", torch.ones(3))]).snapshot()


def frame(kind: bytes, payload: bytes, size: int | None = None) -> bytes:
    return HEAD.pack(kind, len(payload) if size is None else size) + payload


def broken(rng: Random, kind: bytes, good: Any) -> bytes:
    """A frame with a map that is wrong, of another kind, of another size, or with loose bytes."""
    how = rng.randrange(8)
    payload = pack(mutated(good, rng) if how < 5 else good)
    if how == 5:
        return mutated_bytes(frame(kind, payload), rng)
    if how == 6:
        sizes = (0, 1, len(payload) + 1, len(payload) - 1, (64 << 10) + 1, 1 << 31, (1 << 63) - 1, (1 << 64) - 1)
        return frame(kind, payload, rng.choice(sizes))
    if how == 7:
        return frame(rng.choice((ASK, ANSWER, WAIT, REFUSE, BUCKET, b"\xff", b"\0")), payload)
    return frame(kind, payload)


@contextlib.contextmanager
def threads_end_well() -> Iterator[None]:
    """Raises what a thread raised meanwhile."""
    raised: list[Any] = []
    before, threading.excepthook = threading.excepthook, raised.append
    known = set(threading.enumerate())
    try:
        yield
        for thread in set(threading.enumerate()) - known:
            thread.join(HOPELESS_S)
            assert not thread.is_alive(), f"{thread.name} goes on for ever"
    finally:
        threading.excepthook = before
    for one in raised:
        raise one.exc_value


# --- what a trainer and a holder hear ---------------------------------------------------------------------------------


def make_asked(rng: Random) -> list[bytes]:
    """Frames to whoever has a version: the good ones lead to where the broken one is believed."""
    found = [frame(ASK, pack(JOIN))] if rng.random() < 0.7 else []
    found += [broken(rng, ASK, rng.choice(ASKED)) for _ in range(rng.randint(1, 3))]
    if rng.random() < 0.2:
        found[-1] = frame(ASK, pack(rng.choice(ASKED[:2]) | {"address": rng.choice(ADDRESSES), "avoid": [[]]}))
    return [each[: MOST_BYTES // 4] for each in found]


async def run_asked(case: list[bytes]) -> None:
    its = snapshot()
    with threads_end_well():
        hub = Hub("127.0.0.1", 0, lambda: None, gpu_direct=False, timeout_s=1.0)
        outgoing = hub.offer(its, {"w", "other"})
        said = b"".join(case).replace(TOKEN.encode(), outgoing.token.encode())
        try:
            _attend(hub, said)
            good = [JOIN | {"worker": "other"}, {"do": "source", "who": "other/0"}, {"bucket": 0}]
            talk, end = _attend(hub, b"".join(frame(ASK, pack(one | {"token": outgoing.token})) for one in good))
            kind, answer = talk.hear(MOST_ANSWERED, HOPELESS_S)
            assert (kind, answer["way"], answer["brief"]) == (ANSWER, "pull", Brief.of(its.manifest).to_bytes())  # type: ignore[index]
            kind, answer = talk.hear(MOST_ANSWERED, HOPELESS_S)
            assert (kind, type(answer["source"])) == (ANSWER, str)  # type: ignore[index]
            assert talk.hear_head(HOPELESS_S) == (BUCKET, its.buckets[0].numel())
            end.close()
        finally:
            hub.close()


def _attend(hub: Hub, said: bytes) -> tuple[Talk, socket.socket]:
    """A connection on which this is said, served in this thread to its end. Returns the other end of it."""
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * MOST_BYTES)
    ours.sendall(said)
    ours.shutdown(socket.SHUT_WR)
    hub._shelf._attend(theirs, Talk(theirs))
    return Talk(ours), ours


# --- what a receiver hears --------------------------------------------------------------------------------------------


def make_told(rng: Random) -> dict[str, Any]:
    """Frames of a trainer or a holder, and a holder as Redis has it."""
    brief = Brief.of(snapshot().manifest).to_bytes()
    joined = {"who": "w/0", "brief": brief, "way": "pull", "source": rng.choice(ADDRESSES)}
    placed = PLACE | {"who": "w/0", "brief": brief}
    for name in ("rank", "world", "port"):
        if rng.random() < 0.2:
            placed[name] = rng.choice((float("inf"), float("nan"), -1, 0, True, None, 1 << 63, "1", "9" * 5000, [1]))
    manifest = {"manifest": encode(snapshot().manifest), "config": "{}"}
    good = rng.choice((joined, placed, manifest))
    frames = [broken(rng, ANSWER, good) if rng.random() < 0.8 else frame(ANSWER, pack(good))]
    if rng.random() < 0.3:
        frames.insert(0, frame(rng.choice((WAIT, REFUSE, BUCKET)), rng.choice((b"", b"why \xff", bytes(24)))))
    return {"frames": [each[: MOST_BYTES // 4] for each in frames], "holder": rng.choice(ADDRESSES)}


async def run_told(case: dict[str, Any]) -> None:
    said, its = b"".join(case["frames"]), snapshot()
    with _unheard_of(case["holder"]):
        SourceConnection(case["holder"], TOKEN).close()
    with threads_end_well(), _speaker(said) as address:
        order = TransferOrder.from_holders(
            VersionHolder(3, address, TOKEN), [VersionHolder(3, case["holder"], TOKEN)], "", "w", timeout_s=HOPELESS_S
        )
        lines = Lines(None, 0, 1)
        with contextlib.suppress(TransferTimeout):
            lines.newest = order
            answer = lines.join(order, time.monotonic() + HOPELESS_S, cuda=False, gpu="", nccl="")
            with contextlib.suppress(MalformedMessage):
                place = Place.of(answer)
                assert 0 < place.rank < place.world <= 1 << 16
                assert 0 < place.port < 1 << 16
            with contextlib.suppress(RolloutMQError):
                if isinstance(answer.get("brief"), bytes):
                    Brief.of(its.manifest).updated(answer["brief"])
        lines.leave()
        if lines._shelf is not None:
            lines._shelf.close()
    with (
        _speaker(said) as address,
        contextlib.suppress(TransferTimeout),
        contextlib.closing(SourceConnection(address, TOKEN)) as source,
    ):
        source.fetch(0, memoryview(bytearray(its.buckets[0].numel())), HOPELESS_S, math.inf, lambda: "")
    with _speaker(said) as address, contextlib.suppress(TransferTimeout):
        fetch_manifest(
            TransferOrder.from_holders(None, [VersionHolder(3, address, TOKEN)], "", "w", timeout_s=HOPELESS_S)
        )


@contextlib.contextmanager
def _unheard_of(address: str) -> Iterator[None]:
    """Nobody is there, and that is all that may be said of it."""
    try:
        yield
    except TransferTimeout:
        return
    raise AssertionError(f"somebody answers at {address!r}")


@contextlib.contextmanager
def _speaker(said: bytes) -> Iterator[str]:
    """An address at which this is said to whoever asks, who is then left."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def speak() -> None:
            with contextlib.suppress(OSError):
                while True:
                    sock, _ = server.accept()
                    with sock, contextlib.suppress(OSError):
                        sock.recv(1)  # whoever comes asks first
                        sock.sendall(said)
                        sock.shutdown(socket.SHUT_WR)
                        while sock.recv(1 << 16):
                            pass

        speaking = threading.Thread(target=speak, name="fuzz-speaker")
        speaking.start()
        try:
            yield f"127.0.0.1:{server.getsockname()[1]}"
        finally:
            server.shutdown(socket.SHUT_RDWR)
            speaking.join(HOPELESS_S)
            assert not speaking.is_alive(), "whoever came stays for ever"
