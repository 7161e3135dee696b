"""The texts of the scripts."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent
LIBRARIES = ("lib_base", "lib", "lib_pieces")
"""Not scripts: they stand before each of them, in this order."""


@cache
def script_source(name: str, *preamble: str) -> str:
    """The text sent to Redis: the shared functions that the script needs, `preamble`, then the script.

    Redis creates every function of a text anew for each call. All the shared ones took 10 microseconds, as long as it
    takes to acknowledge two results.
    """
    text = "".join(preamble) + script_path(name).read_text()
    for part in reversed(_shared_parts()):
        names = re.match(r"local (?:function )?([\w, ]+)", part)
        assert names is not None, part
        if re.search(rf"\b({names[1].strip().replace(', ', '|')})\b", text):
            text = part + text
    return text


@cache
def _shared_parts() -> list[str]:
    """The libraries' definitions in order, each with its lines up to the next one. A part only uses parts before it."""
    shared = "".join(script_path(library).read_text() + "\n" for library in LIBRARIES)
    return re.split(r"^(?=local )", re.sub(r"^ *--.*\n", "", shared, flags=re.MULTILINE), flags=re.MULTILINE)[1:]


def script_names() -> list[str]:
    """The names of all scripts."""
    return sorted(path.stem for path in FOLDER.rglob("*.lua") if path.stem not in LIBRARIES)


@cache
def script_path(name: str) -> Path:
    """Where the script of that name is: each kind has a folder of its own. Raises KeyError."""
    return {path.stem: path for path in FOLDER.rglob("*.lua")}[name]
