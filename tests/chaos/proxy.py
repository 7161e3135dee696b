"""A TCP proxy between a process and a pool's servers that can be told to misbehave."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from functools import cache, partial
from hashlib import sha1
from types import TracebackType
from typing import Literal, Self

from rolloutmq.messages.scripts.source import FOLDER, LIBRARIES, script_source

from .resp import Requests

Direction = Literal["up", "down"]
LOOPBACK = "127.0.0.1"
CHUNK = 1 << 16
EMPTY = (b"-", b"*-1", b"$-1", b"*0")
"""Beginnings of replies that carry nothing: an error, nil, nothing found. Losing one would prove nothing."""
SILENT = {"EVALSHA settle"}
"""What never answers more than nil: there is a reply to lose all the same."""


def script_names() -> list[str]:
    """Every script of the package."""
    return sorted(path.stem for path in FOLDER.rglob("*.lua") if path.stem not in LIBRARIES)


@cache
def _names() -> dict[bytes, str]:
    return {sha1(script_source(name).encode()).hexdigest().encode(): name for name in script_names()}


def kind_of(words: list[bytes]) -> str:
    """ "EVALSHA claim" for a script, else the command's name."""
    command = words[0].upper().decode()
    if command == "EVALSHA" and len(words) > 1:
        return f"EVALSHA {_names().get(words[1], '?')}"
    return command


class Proxy:
    """The network of a process: a port for each of the pool's servers, which all misbehave alike. `url` is what to give
    to the process. Start and end it with `async with`.

    seen: how often each kind of command passed. dropped: kinds of the commands whose replies were swallowed.
    """

    def __init__(self, *ports: int) -> None:
        """ports: of the servers, the pool's home first."""
        self.targets = list(ports)
        self.delay_s = 0.0
        self.seen: Counter[str] = Counter()
        self.dropped: list[str] = []
        self._drop = ""
        self._refuse = False
        self._open: dict[Direction, asyncio.Event] = {"up": asyncio.Event(), "down": asyncio.Event()}
        for gate in self._open.values():
            gate.set()
        self._links: set[_Link] = set()
        self._servers: list[asyncio.Server] = []

    async def __aenter__(self) -> Self:
        for place in range(len(self.targets)):
            accept = partial(self._accept, place)
            self._servers.append(await asyncio.start_server(accept, LOOPBACK, 0, limit=CHUNK))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for server in self._servers:
            server.close()
        self.heal()
        self.close_all()
        await asyncio.gather(*(link.task for link in list(self._links)), return_exceptions=True)

    @property
    def ports(self) -> list[int]:
        """Its own, in the order of the servers'."""
        return [int(server.sockets[0].getsockname()[1]) for server in self._servers]

    @property
    def url(self) -> str:
        return ",".join(f"redis://{LOOPBACK}:{port}/0" for port in self.ports)

    # --- faults ----------------------------------------------------------------------------------------------------

    def cut(self, *directions: Direction) -> None:
        """Nothing arrives in these directions any more ("up": at Redis). As in a real network it is not lost: what was
        sent arrives when the cut is healed, even if its sender has given up and hung up meanwhile."""
        for direction in directions:
            self._open[direction].clear()

    def heal(self) -> None:
        """Everything passes again, what was held back first."""
        for gate in self._open.values():
            gate.set()

    def drop_reply(self, kind: str) -> None:
        """The next command of this kind is executed, its reply swallowed and its connection closed."""
        self._drop = kind

    def close_all(self) -> None:
        """Every connection breaks."""
        for link in list(self._links):
            link.task.cancel()

    def repoint(self, port: int) -> None:
        """From now on, connections go to another server (of a pool with one); those there are break."""
        self.targets = [port]
        self.close_all()

    def refuse(self, on: bool) -> None:
        """New connections are closed at once."""
        self._refuse = on

    # --- inside ----------------------------------------------------------------------------------------------------

    async def _accept(self, place: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = _Link(self, place, reader, writer)
        self._links.add(link)
        try:
            if not self._refuse:
                await link.run()
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            self._links.discard(link)
            writer.transport.abort()

    def note(self, words: list[bytes]) -> str | None:
        """A command passes; its kind if its reply is to be swallowed."""
        kind = kind_of(words)
        self.seen[kind] += 1
        return kind if kind == self._drop else None

    def swallowed(self, kind: str) -> None:
        """It happened. Not again."""
        self.dropped.append(kind)
        self._drop = ""

    async def passing(self, direction: Direction) -> None:
        """Return when bytes may pass in this direction."""
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        await self._open[direction].wait()


class _Link:
    """One connection through the proxy, to the server at this place."""

    def __init__(self, proxy: Proxy, place: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._proxy, self._place = proxy, place
        self._reader, self._writer = reader, writer
        self._drop: str | None = None
        task = asyncio.current_task()
        assert task is not None
        self.task = task

    async def run(self) -> None:
        reader, writer = await asyncio.open_connection(LOOPBACK, self._proxy.targets[self._place], limit=CHUNK)
        down = asyncio.create_task(self._down(reader, writer))
        up = asyncio.create_task(self._up(writer))
        try:
            # A client that hung up behind a cut: what it had sent before is still to be delivered.
            await asyncio.wait({down, up}, return_when=asyncio.FIRST_COMPLETED)
            if up.done() and not up.cancelled() and up.exception() is None and not down.done():
                with contextlib.suppress(OSError):
                    writer.write_eof()
                await down
        finally:
            for task in (down, up):
                task.cancel()
            await asyncio.gather(down, up, return_exceptions=True)
            writer.transport.abort()

    async def _up(self, writer: asyncio.StreamWriter) -> None:
        requests = Requests()
        while data := await self._reader.read(CHUNK):
            for words in requests.feed(data):
                self._drop = self._drop or self._proxy.note(words)
            await self._proxy.passing("up")
            writer.write(data)
            await writer.drain()

    async def _down(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(CHUNK):
            if self._drop is not None:
                if not data.startswith(b"-" if self._drop in SILENT else EMPTY):
                    self._proxy.swallowed(self._drop)
                    writer.write_eof()  # the server has it, and what came with it
                    while await reader.read(CHUNK):
                        pass
                    return
                self._drop = None
            await self._proxy.passing("down")
            with contextlib.suppress(OSError):  # nobody reads any more; the server must not notice
                self._writer.write(data)
                await self._writer.drain()
