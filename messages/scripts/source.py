"""The texts of the scripts."""

from __future__ import annotations

from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent
LIBRARIES = ("lib_base", "lib")
"""Not scripts: they stand before each of them, in this order."""


@cache
def script_source(name: str, *preamble: str) -> str:
    """The text sent to Redis: the shared functions, `preamble`, then the script."""
    shared = "".join(script_path(library).read_text() + "\n" for library in LIBRARIES)
    return shared + "".join(preamble) + script_path(name).read_text()


@cache
def script_path(name: str) -> Path:
    """Where the script of that name is: each kind has a folder of its own. Raises KeyError."""
    return {path.stem: path for path in FOLDER.rglob("*.lua")}[name]
