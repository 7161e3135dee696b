"""Output to a terminal: text without control characters, and a line with an operation's progress."""

from __future__ import annotations

import sys
import time
from datetime import UTC, datetime
from typing import Any

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
    """A progress line on stderr, so that stdout holds the result alone."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._at = float("-inf")
        self._last = ""

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *_: object) -> None:
        if self._terminal and self._last:
            sys.stderr.write("\n")

    def report(self, seen: dict[str, Any]) -> None:
        """Show the `progress` in an operation's report."""
        progress = seen.get("progress") or {}
        if progress:
            self.show(progress.get("done", 0), progress.get("total"), progress.get("message", ""))

    def show(self, done: int, total: int | None, message: str) -> None:
        text = printable(f"{done:,} of {total:,}  {message}" if total is not None else f"{done:,}  {message}")[:200]
        if text == self._last:
            return
        if self._terminal:
            sys.stderr.write(f"\r\x1b[K{text}")
        elif time.monotonic() - self._at >= LOG_EVERY_S:
            sys.stderr.write(text + "\n")
            self._at = time.monotonic()
        self._last = text
        sys.stderr.flush()
