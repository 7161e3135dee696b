"""One line on a terminal that says how far an operation is; lines of their own where there is no terminal."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

from .cli.errors import printable

LOG_EVERY_S = 10.0


class ProgressLine:
    """Writes to stderr, so that stdout is the result alone."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._at = float("-inf")
        self._last = ""

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._terminal and self._last:
            sys.stderr.write("\n")

    def report(self, seen: dict[str, Any]) -> None:
        """Show the `progress` of what an operation reports."""
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
