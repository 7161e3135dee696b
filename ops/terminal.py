"""Output to a terminal: text without control characters, and a line with an operation's progress."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..messages.progress import Bar

LOG_EVERY_S = 10.0


def printable(text: str, keep: str = "") -> str:
    """`text` without control characters but `keep`: dead letters and errors hold whatever somebody wrote into them."""
    return "".join(char if char.isprintable() or char in keep else "\ufffd" for char in text)


def when(seconds: float | None) -> str:
    """Unix seconds as a date in UTC."""
    if seconds is None or not 0 < seconds < 1 << 34:
        return "at an unknown time"
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


class ProgressLine:
    """Progress on stderr, so that stdout holds the result alone: a bar on a terminal, else a line now and then."""

    def __init__(self) -> None:
        self._bar: Bar | None = None
        if sys.stderr.isatty():
            from ..messages.progress import Bar  # noqa: PLC0415 – most commands draw none

            self._bar = Bar(True, "")
        self._at = float("-inf")
        self._last = ""

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def report(self, seen: dict[str, Any]) -> None:
        """Show the `progress` in an operation's report."""
        progress = seen.get("progress") or {}
        if progress:
            self.show(progress.get("done", 0), progress.get("total"), progress.get("message", ""))

    def counting(self, total: int, message: str) -> Callable[[int], None]:
        """A function that is told of so many more that are done of `total`."""
        done = 0

        def more(count: int) -> None:
            nonlocal done
            done += count
            self.show(done, total, message)

        return more

    def show(self, done: int, total: int | None, message: str) -> None:
        if self._bar is not None:
            self._bar.show(done, total, printable(message)[:200])
            return
        text = printable(f"{done:,} of {total:,}  {message}" if total is not None else f"{done:,}  {message}")[:200]
        if text == self._last:
            return
        if time.monotonic() - self._at >= LOG_EVERY_S:
            sys.stderr.write(text + "\n")
            self._at = time.monotonic()
        self._last = text
        sys.stderr.flush()
