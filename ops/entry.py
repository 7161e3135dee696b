"""The `rolloutmq` command. A bare producer install lacks its libraries: the command says which."""

from __future__ import annotations

import os
import sys
from io import TextIOWrapper


def main() -> None:
    """Run the command line."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(
            stream, TextIOWrapper
        ):  # names of files need not be text, and not every terminal has every letter
            stream.reconfigure(errors="backslashreplace")
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
