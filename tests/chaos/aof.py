"""Redis' append-only file, read back: every write the server made, in the one order in which it made them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import hiredis

SETTINGS = {"auto-aof-rewrite-percentage": "0", "aof-use-rdb-preamble": "no"}
"""A server whose log is to be read must neither compact it nor write a part of it in another format."""


def read_commands(directory: Path) -> Iterator[list[bytes]]:
    """Commands with their arguments. A transaction whose end did not make it into the file never happened."""
    pending: list[list[bytes]] | None = None
    for path in _files(directory):
        reader = hiredis.Reader()
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                reader.feed(chunk)
                while (command := reader.gets()) is not False:
                    name = command[0].upper()
                    if name == b"MULTI":
                        pending = []
                    elif name == b"EXEC":
                        yield from pending or ()
                        pending = None
                    elif pending is not None:
                        pending.append(command)
                    elif name != b"SELECT":
                        yield command


def _files(directory: Path) -> list[Path]:
    single = directory / "appendonly.aof"  # Redis 6.2
    if single.is_file():
        return [single]
    folder = directory / "appendonlydir"  # Redis 7: a manifest names the parts, base first
    parts = []
    for line in (folder / "appendonly.aof.manifest").read_text().splitlines():
        words = line.split()
        fields = dict(zip(words[::2], words[1::2], strict=True))
        if fields["type"] != "h":
            parts.append((fields["type"] == "i", int(fields["seq"]), folder / fields["file"]))
    return [path for _, _, path in sorted(parts)]
