"""The files that commands read and write: errors name the option, the path and the reason."""

from __future__ import annotations

import errno
import json
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..messages.errors import InvalidField

MOST_BYTES = 3 * (64 << 20)
"""Most bytes of a line, or of a document that is read whole. A job has at most 64 MiB (codec.MAX_MESSAGE_BYTES, which
takes long to import), and at most three times that in JSON: a token id has up to 12 instead of 4 bytes, an escaped
letter 6 instead of 2."""
MOST_LINES = 1 << 22
MOST_INPUT_BYTES = 4 << 30
"""So many lines, and bytes of them, a command keeps in memory: a file of prompts may be a pipe without an end."""
SHOWN = 60
"""An error shows at most so many characters of a line."""


@contextmanager
def writing(option: str, path: Path) -> Iterator[None]:
    """Raise InvalidField, which names option and path, for every error of the operating system in the block."""
    try:
        yield
    except OSError as error:
        raise InvalidField(option, str(path), f"cannot be written: {error.strerror or error}") from error


def check_out(option: str, path: Path, *, folder: bool = False) -> None:
    """Raise InvalidField if a file, or a folder with files, cannot be written at `path`. Leaves nothing there.

    Folders on the way to it need not exist yet.
    """
    with writing(option, path):
        # A device is no file: one of the commands would put a file into its place.
        if path.exists() and not (path.is_dir() if folder else path.is_file()):
            raise InvalidField(option, str(path), f"must be a {'folder' if folder else 'file'}")
        at = next(one for one in (path, *path.absolute().parents) if one.exists())
        if at != path and not at.is_dir():
            raise InvalidField(option, str(path), f"{at} must be a folder")
        with tempfile.TemporaryFile(dir=at) if at.is_dir() else at.open("ab"):
            pass


def save_model(model: Any, folder: Path) -> None:
    """`model.save_pretrained(folder)`. Raises OSError also for the errors that safetensors has of its own."""
    from safetensors import SafetensorError  # noqa: PLC0415 – only who has a model has it

    try:
        model.save_pretrained(folder)
    except SafetensorError as error:
        raise OSError(errno.EIO, str(error), str(folder)) from error


def read(option: str, path: Path, *, most: int = MOST_BYTES) -> bytes:
    """A file's content. Raises InvalidField, also for more than `most` bytes."""
    content = head(option, path, most + 1)
    if len(content) > most:
        raise InvalidField(option, str(path), f"must have at most {most:,} bytes")
    return content


def head(option: str, path: Path, count: int) -> bytes:
    """The first `count` bytes of a file. Raises InvalidField."""
    with reading(option, path), path.open("rb") as file:
        return file.read(count)


def lines(option: str, path: Path, *, kept: bool = True) -> Iterator[bytes]:
    """The lines of a file, with their ends, as they are read.

    kept: the caller keeps them all. Raises InvalidField, also for a line over MOST_BYTES, and for more lines or bytes
    than a caller may keep.
    """
    with reading(option, path), path.open("rb") as file:
        number, nbytes = 0, 0
        while line := file.readline(MOST_BYTES + 1):
            number, nbytes = number + 1, nbytes + len(line)
            if len(line) > MOST_BYTES:
                raise InvalidField(option, str(path), f"line {number} must have at most {MOST_BYTES:,} bytes")
            if kept and (number > MOST_LINES or nbytes > MOST_INPUT_BYTES):
                most = f"at most {MOST_LINES:,} lines and {MOST_INPUT_BYTES:,} bytes"
                raise InvalidField(option, str(path), f"must have {most}; split it into several files")
            yield line


@contextmanager
def reading(option: str, path: Path) -> Iterator[None]:
    """Raise InvalidField, which names option and path, for every error of the operating system in the block."""
    try:
        yield
    except OSError as error:
        raise InvalidField(option, str(path), f"must be a file that can be read: {error.strerror or error}") from error


def json_lines(raw_lines: Iterable[bytes]) -> Iterator[tuple[int, Any]]:
    """(line number, value) of each line of JSON; empty lines count and are left out. Raises InvalidField."""
    for number, raw in enumerate(raw_lines, start=1):
        if raw.strip():
            yield number, json_value(f"line {number}", raw)


def json_value(field: str, raw: bytes | str) -> Any:
    """The value of a JSON text. Raises InvalidField for what is no JSON or no UTF-8, too deep, or a number too long."""
    try:
        return json.loads(raw)
    except RecursionError:
        why = "nested less deep"
    except ValueError as error:
        why = f"JSON in UTF-8: {error}"
    shown = raw.strip()[:SHOWN]
    raise InvalidField(field, shown.decode(errors="replace") if isinstance(shown, bytes) else shown, why)
