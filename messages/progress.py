"""A progress bar on stderr: what is done, of how much, how fast, and what failed."""

from __future__ import annotations

import sys
import time
import weakref
from typing import TYPE_CHECKING, Any, Self

from .errors import ConfigError

if TYPE_CHECKING:
    from rich.progress import Progress

REFRESHES = 4
"""A second."""


class Bar:
    """A bar of rich's on a terminal and in a notebook; elsewhere, and if it was not asked for, nothing is written.

    stdout is never touched: programs may read it. What is drawn begins with the first call of `add` or `show`, and ends
    with `close`, with the object, or with the process.

    asked: whether there is a bar, or the text in front of it. name: that text otherwise. total: None if not known.
    Raises ConfigError if rich is not installed.
    """

    def __init__(self, asked: bool | str, name: str, total: int | None = None) -> None:
        self.done, self.failed, self.total = 0, 0, total
        self._began = time.monotonic()
        self._rich = _progress() if asked else None
        self._end: Any = None  # a finalizer, while it is drawn: it shows the cursor again
        if self._rich is not None:
            self._rich.add_task(asked if isinstance(asked, str) else name, total=None, rate="", note="", failed="")

    def __bool__(self) -> bool:
        """Whether something is drawn."""
        return self._rich is not None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, done: int = 1, failed: int = 0) -> None:
        """So many more are done; `failed` of them failed."""
        self.done, self.failed = self.done + done, self.failed + failed
        self._draw("")

    def show(self, done: int, total: int | None, note: str = "") -> None:
        """So many of `total` are done by now. note: a text behind it."""
        self.done, self.total = done, total
        self._draw(note)

    def close(self) -> None:
        """Draw what there is for the last time. A bar that is used afterwards is drawn anew."""
        if self._end is not None:
            self._end()
            self._end = None

    def _draw(self, note: str) -> None:
        if self._rich is None:
            return
        rate = self.done / max(1e-3, time.monotonic() - self._began)
        failed = f"{self.failed:,} failed" if self.failed else ""
        self._rich.update(
            self._rich.task_ids[0], completed=self.done, total=self.total, note=note, failed=failed,
            rate=f"{rate:,.0f}/s" if rate >= 10 else f"{rate:.2g}/s",
        )  # fmt: skip
        if self._end is None:
            self._rich.start()
            self._end = weakref.finalize(self, self._rich.stop)


def _progress() -> Progress | None:
    """None where nobody sees it, also where a variable of rich's makes it take a file for a terminal."""
    try:
        from rich.console import Console  # noqa: PLC0415 – an extra
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: PLC0415
    except ModuleNotFoundError:
        raise ConfigError("a progress bar needs rich: pip install 'rolloutmq[cli]'") from None
    console = Console(stderr=True)
    if not ((sys.stderr is not None and sys.stderr.isatty()) or console.is_jupyter):
        return None
    texts = [TextColumn(f"{{task.{part}}}", markup=False) for part in ("description", "fields[rate]", "fields[note]")]
    failed = TextColumn("{task.fields[failed]}", style="red", markup=False)
    name, rate, note = texts
    return Progress(
        name, BarColumn(), MofNCompleteColumn(), rate, failed, note, TimeElapsedColumn(),
        console=console, refresh_per_second=REFRESHES, redirect_stdout=False, redirect_stderr=False,
    )  # fmt: skip
