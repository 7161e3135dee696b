"""The `rolloutmq` command. A bare producer install lacks its libraries: the command says which."""

from __future__ import annotations

import os
import sys
from io import TextIOWrapper
from typing import TextIO


def main() -> None:
    """Run the command line."""
    sys.stdout, sys.stderr = sys.stdout or _nowhere(), sys.stderr or _nowhere()
    # Names of files need not be text, not every terminal has every letter, and anything can be typed.
    for stream, errors in ((sys.stdout, "backslashreplace"), (sys.stderr, "backslashreplace"), (sys.stdin, "replace")):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors=errors)
    try:
        try:
            from .cli import app  # noqa: PLC0415
        except ModuleNotFoundError as error:
            if error.name in {"typer", "rich", "click"}:
                sys.exit(f"the rolloutmq command needs {error.name}: pip install 'rolloutmq[cli]'")
            raise
        app()
    except KeyboardInterrupt:  # before there was a command that could say so
        sys.exit(130)
    finally:
        _flush()


def _nowhere() -> TextIO:
    """Instead of a stream that was closed before the command began (`2>&-`)."""
    return open(os.devnull, "w", encoding="utf-8")


def _flush() -> None:
    """Write what is left to write. Where nobody reads on, or the disk is full, Python would complain when it ends."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


if __name__ == "__main__":
    main()
