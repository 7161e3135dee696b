"""A terminal in place of this process' stderr, for what draws there."""

from __future__ import annotations

import contextlib
import os
import pty
import sys
import threading
from collections.abc import Iterator

import pyte
import pytest

COLUMNS = 100


@contextlib.contextmanager
def stderr_as_terminal() -> Iterator[pyte.Screen]:
    """sys.stderr is a terminal while the block lasts. The screen has what was written when it is over."""
    screen = pyte.Screen(COLUMNS, 24)
    stream = pyte.ByteStream(screen)
    master, slave = pty.openpty()

    def read() -> None:
        with contextlib.suppress(OSError):  # nobody has the other end any more
            while data := os.read(master, 1 << 16):
                stream.feed(data)

    reader = threading.Thread(target=read)
    reader.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(COLUMNS))
        patch.setenv("TERM", "xterm-256color")
        with os.fdopen(slave, "w") as terminal:
            patch.setattr(sys, "stderr", terminal)
            yield screen
    reader.join()
    os.close(master)


def last_line(screen: pyte.Screen) -> str:
    """The last line that is not empty."""
    return next((line.rstrip() for line in reversed(screen.display) if line.strip()), "")
