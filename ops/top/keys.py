"""Keys of a terminal, one by one and without an echo. Afterwards the terminal is as it was."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import termios
from collections.abc import Callable
from typing import Self

ESCAPE_S = 0.05
"""A lone escape is a key of its own, unless the rest of a sequence comes within so many seconds."""
_ARROWS = {"A": "up", "B": "down", "C": "enter", "D": "escape", "H": "home", "F": "end"}
NAMES = {
    **{f"\x1b{mode}{letter}": name for mode in "[O" for letter, name in _ARROWS.items()},
    **{"\x1b[5~": "pageup", "\x1b[6~": "pagedown", "\x1b[1~": "home", "\x1b[4~": "end"},
    **{"\r": "enter", "\n": "enter", "\x1b": "escape", "\x7f": "escape", "\b": "escape"},
    **{"k": "up", "j": "down", "l": "enter", "h": "escape", "g": "home", "G": "end", "q": "quit", "Q": "quit"},
}
"""What keys send -> their names. The right arrow opens like enter, the left one goes back like escape."""
_SEQUENCE = re.compile(r"\x1b[\[O][0-9;]*[A-Za-z~]|\x1b(?=[^\[O])|[^\x1b]", re.DOTALL)


class Keyboard:
    """Calls `on_key` with the name of every key, while it is open. The end of the terminal counts as "quit"."""

    def __init__(self, on_key: Callable[[str], None], fd: int = 0) -> None:
        self._on_key, self._fd = on_key, fd
        self._rest = ""
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> Self:
        self._before = termios.tcgetattr(self._fd)
        mode = termios.tcgetattr(self._fd)
        mode[3] &= ~(termios.ECHO | termios.ICANON)
        mode[6][termios.VMIN], mode[6][termios.VTIME] = 1, 0
        mode[6][termios.VSUSP] = b"\0"  # Ctrl-Z would leave a terminal without an echo
        termios.tcsetattr(self._fd, termios.TCSADRAIN, mode)
        asyncio.get_running_loop().add_reader(self._fd, self._read)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.get_running_loop().remove_reader(self._fd)
        if self._timer is not None:
            self._timer.cancel()
        with contextlib.suppress(termios.error):  # the terminal is gone
            termios.tcsetattr(self._fd, termios.TCSADRAIN, self._before)

    def _read(self) -> None:
        try:
            data = os.read(self._fd, 4096)
        except OSError:
            data = b""
        if not data:
            asyncio.get_running_loop().remove_reader(self._fd)
            self._on_key("quit")
            return
        if self._timer is not None:
            self._timer.cancel()
        self._take(data.decode(errors="replace"))

    def _take(self, text: str) -> None:
        """Tell the keys in what has come, and keep the beginning of a sequence until the rest is there."""
        text, at = self._rest + text, 0
        while found := _SEQUENCE.match(text, at):
            at = found.end()
            if name := NAMES.get(found[0]):
                self._on_key(name)
        self._rest = text[at:]
        if self._rest:
            self._timer = asyncio.get_running_loop().call_later(ESCAPE_S, self._alone)

    def _alone(self) -> None:
        self._rest = ""
        self._on_key("escape")
