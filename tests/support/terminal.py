"""A terminal for a command, as an operator has one: a pty, and a screen that shows what the command writes to it."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from typing import Any, Self

import pyte
from support.pools.pool import eventually

FOREGROUND = (
    "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"  # so that Ctrl-C is a signal
    "from rolloutmq.ops.entry import main; main()"
)
KEYS = {"up": "\x1b[A", "down": "\x1b[B", "pagedown": "\x1b[6~", "end": "\x1b[F", "enter": "\r", "escape": "\x1b"}
ALTERNATE = re.compile(rb"\x1b\[\?1049([hl])")


class Terminal:
    """Runs a command of `rolloutmq` in the foreground of a terminal of its own. Kills it when the block is left."""

    def __init__(self, *command: str, columns: int = 80, lines: int = 24) -> None:
        self.screen = pyte.Screen(columns, lines)
        self.written = b""
        self._stream = pyte.ByteStream(self.screen)
        self._master, self._slave = pty.openpty()
        self._size(columns, lines)
        self.before = termios.tcgetattr(self._slave)
        self.process = subprocess.Popen(
            [sys.executable, "-c", FOREGROUND, *command],
            stdin=self._slave,
            stdout=self._slave,
            stderr=self._slave,
            env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "20", "LINES": "5"},  # which do not follow a resize
            start_new_session=True,
        )

    async def __aenter__(self) -> Self:
        asyncio.get_running_loop().add_reader(self._master, self._read)
        return self

    async def __aexit__(self, *_: object) -> None:
        asyncio.get_running_loop().remove_reader(self._master)
        self.process.kill()
        self.process.wait()
        os.close(self._master)
        os.close(self._slave)

    def _read(self) -> None:
        data = os.read(self._master, 1 << 16)
        self.written += data
        self._stream.feed(data)

    def _size(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def resize(self, columns: int, lines: int) -> None:
        """As when somebody drags the window's corner."""
        self.screen.resize(lines, columns)
        self._size(columns, lines)

    def press(self, *keys: str) -> None:
        """Keys by name, or as the letters that they send."""
        os.write(self._master, "".join(KEYS.get(key, key) for key in keys).encode())

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.screen.display)

    def line(self, part: str) -> str:
        """The first line with this part, "" without one."""
        return next((line for line in self.screen.display if part in line), "")

    def marked(self) -> str:
        """The line in reverse video: what is chosen."""
        for number, line in enumerate(self.screen.display):
            if self.screen.buffer[number][0].reverse:
                return line.rstrip()
        return ""

    async def shows(self, *wanted: str | Callable[[], Any]) -> str:
        """The screen, once all of this is on it, or true."""

        def there() -> bool:
            assert self.process.poll() is None, f"it ended with {self.process.returncode}"
            return all(it() if callable(it) else it in self.text for it in wanted)

        try:
            await eventually(there)
        except AssertionError as error:
            raise AssertionError(f"{wanted}: {error}; the screen:\n{self.text}") from None
        return self.text

    async def ended(self) -> int:
        """The exit code, once the command is over and all that it wrote is read."""
        code: int = await asyncio.wait_for(asyncio.to_thread(self.process.wait), 30)
        return code

    def as_it_was(self) -> bool:
        """Whether the terminal's mode is what it was, its own screen is back, and so is the cursor."""
        screens = ALTERNATE.findall(self.written)
        cursor = re.findall(rb"\x1b\[\?25([hl])", self.written)
        return termios.tcgetattr(self._slave) == self.before and screens[-1:] == [b"l"] and cursor[-1:] == [b"h"]
