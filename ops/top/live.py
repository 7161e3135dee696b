"""The terminal: looks at the pool at a pace, and draws after every look and every key."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from redis.exceptions import RedisError
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from ...messages.errors import RolloutMQError
from ...messages.redis import PoolRedis
from ..redis import connected
from .history import History, speed
from .keys import Keyboard
from .lines import cells, lasting
from .reader import Focus, Look, Reader
from .views import PoolView, View

PER_WORKER_S = 0.01
"""A look asks one question for each worker. In a large pool looks are rarer, so that these are 100 a second at most."""
SHARE = 10
"""One part of the time in so many is spent with looks: a slow Redis is asked less often."""
LEAST_S, LONGEST_S = 0.1, 10.0
"""Between two looks, whatever keys are pressed, and however slow Redis is."""
TICK_S = 1.0
"""Between two drawings at most."""
LATE_S = 1.5
"""When the last look is so much older than it should be, the screen says so."""


async def figures(redis_url: str, pool: str, every_s: float) -> tuple[dict[str, Any], list[Text]]:
    """Two looks `every_s` apart, because rates need two: the state for programs, and a picture for people.

    Raises RedisUnavailable, ConfigError, InvalidField.
    """
    async with connected(redis_url, pool) as redis:
        reader, history = Reader(redis, pool), History()
        history.add(await reader.look(Focus()))
        await asyncio.sleep(every_s)
        look = await reader.look(Focus())
        history.add(look)
    rates = {
        "tokens_per_s": speed(look.state),
        "jobs_per_s": history.jobs_per_s(),
        "seconds_of_work": history.seconds_of_work(look.state),
        "unread_clients": look.unread_clients,
    }
    everybody = len(look.state["workers"]) + 12
    return look.state | rates, PoolView().draw(look, history, _console().width, everybody)


async def watch(redis_url: str, pool: str, every_s: float) -> None:
    """Show the pool until somebody presses q or Ctrl-C. Raises what `figures` does, at its beginning only."""
    async with connected(redis_url, pool) as redis:
        await Top(redis, pool, every_s).run()


class Top:
    """The screen and what is on it. The last view of `_views` is open."""

    def __init__(self, redis: PoolRedis, pool: str, every_s: float, console: Console | None = None) -> None:
        self._reader, self._every_s = Reader(redis, pool), every_s
        self._console = console or _console()
        self._views: list[View] = [PoolView()]
        self._history = History()
        self._look: Look | None = None
        self._trouble = ""
        self._heard_at = time.monotonic()
        self._draw, self._again, self._over = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def run(self) -> None:
        """Until "quit" or a signal. The terminal is then as it was."""
        live = Live(
            console=self._console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
        )
        keyboard = Keyboard(self._on_key) if sys.stdin.isatty() else contextlib.nullcontext()
        with _signals(self._over.set, self._draw.set), keyboard, live:
            async with asyncio.TaskGroup() as tasks:
                both = [tasks.create_task(self._looks()), tasks.create_task(self._draws(live))]
                await self._over.wait()
                for task in both:
                    task.cancel()

    async def _looks(self) -> None:
        while True:
            began = time.monotonic()
            self._again.clear()
            try:
                self._look = await self._reader.look(self._views[-1].focus())
                self._history.add(self._look)
                self._trouble, self._heard_at = "", time.monotonic()
            except (RedisError, OSError, RolloutMQError) as error:
                self._trouble = str(error) or type(error).__name__
            self._draw.set()
            workers = len(self._look.state["workers"]) if self._look else 0
            took = time.monotonic() - began
            least = max(LEAST_S, workers * PER_WORKER_S, min(SHARE * took, LONGEST_S))
            await asyncio.sleep(least)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, self._every_s - least)):
                    await self._again.wait()

    async def _draws(self, live: Live) -> None:
        while True:
            live.update(Group(*self.picture()), refresh=True)
            if self._look is not None and self._views[-1].focus() != self._look.focus:
                self._again.set()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self._draw.wait()
            self._draw.clear()

    def _on_key(self, key: str) -> None:
        if key == "quit":
            self._over.set()
        elif key == "escape":
            if len(self._views) > 1:
                self._views.pop()
        elif opened := self._views[-1].key(key):
            self._views.append(opened)
        self._draw.set()

    def picture(self) -> list[Text]:
        """The lines of the screen, as many as it has."""
        width, height = self._console.size
        lines = [Text("looking …")]
        if self._look is not None:
            lines = self._views[-1].draw(self._look, self._history, width, height - 1)
        lines += [Text()] * (height - 1 - len(lines))
        return [*lines[: height - 1], self._last_line(width)]

    def _last_line(self, width: int) -> Text:
        silent_s = time.monotonic() - self._heard_at
        if not self._trouble and silent_s < LATE_S + self._every_s:
            return Text(cells(self._views[-1].keys, width), "dim")
        told = f"no answer for {lasting(silent_s)}, trying again: {self._trouble}".removesuffix(": ")
        return Text(cells(told, width), "bold red")


def _console() -> Console:
    """Of the size that the terminal has, whatever COLUMNS and LINES say: they do not follow it."""
    return Console(_environ={name: it for name, it in os.environ.items() if name not in {"COLUMNS", "LINES"}})


@contextlib.contextmanager
def _signals(end: Callable[[], None], resized: Callable[[], None]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    handlers = dict.fromkeys((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), end) | {signal.SIGWINCH: resized}
    for number, handler in handlers.items():
        loop.add_signal_handler(number, handler)
    try:
        yield
    finally:
        for number in handlers:
            loop.remove_signal_handler(number)
