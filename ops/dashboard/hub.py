"""From one reader to any number of browsers: each tick is written once, and nobody who is slow holds up others."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

import orjson

from ..journal import plain

AHEAD = 8
"""Ticks that wait for one viewer. Who is further behind gets the whole state instead."""
MOST_VIEWERS = 1000


def as_json(value: Any) -> bytes:
    """JSON; NaN and infinity become null."""
    try:
        return orjson.dumps(value)
    except TypeError:  # it has lone surrogates, long integers or arrays
        return json.dumps(plain(value), default=str, separators=(",", ":")).encode()


def merge_patch(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """What turns `before` into `after` by RFC 7386; empty if nothing changed."""
    patch: dict[str, Any] = dict.fromkeys(before.keys() - after.keys())
    for name, value in after.items():
        old = before.get(name)
        if isinstance(value, Mapping) and isinstance(old, Mapping):
            if inner := merge_patch(old, value):
                patch[name] = inner
        elif name not in before or old != value:
            patch[name] = value
    return patch


class Hub:
    """Gives ticks to viewers. snapshot: the whole state as JSON, made when a viewer begins, once for each tick."""

    def __init__(self, snapshot: Callable[[], bytes]) -> None:
        self._snapshot = snapshot
        self._made: tuple[int, bytes] = (-1, b"")
        self._viewers: set[_Viewer] = set()
        self.number = 0

    @property
    def viewers(self) -> int:
        """How many there are."""
        return len(self._viewers)

    def send(self, tick: Mapping[str, Any]) -> None:
        """Give a tick to everybody."""
        self.number += 1
        if self._viewers:
            event = _event(b"tick", self.number, as_json(tick))
            for viewer in self._viewers:
                viewer.put(event)

    async def events(self) -> AsyncGenerator[bytes]:
        """What one viewer gets: a snapshot, then ticks; a snapshot again whenever it was too slow."""
        viewer = _Viewer()
        self._viewers.add(viewer)
        try:
            while True:
                if viewer.behind:
                    viewer.begin()
                    yield self._whole()
                else:
                    yield await viewer.queue.get()
        finally:
            self._viewers.discard(viewer)

    def _whole(self) -> bytes:
        if self._made[0] != self.number:
            self._made = self.number, _event(b"snapshot", self.number, self._snapshot())
        return self._made[1]


class _Viewer:
    def __init__(self) -> None:
        self.queue: asyncio.Queue[bytes] = asyncio.Queue(AHEAD)
        self.behind = True

    def begin(self) -> None:
        while not self.queue.empty():
            self.queue.get_nowait()
        self.behind = False

    def put(self, event: bytes) -> None:
        if self.queue.full():
            self.behind = True
        if not self.behind:
            self.queue.put_nowait(event)


def _event(kind: bytes, number: int, data: bytes) -> bytes:
    return b"event: %s\nid: %d\ndata: %s\n\n" % (kind, number, data)
