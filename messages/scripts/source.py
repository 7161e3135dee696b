"""The texts of the scripts."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from ..redis import script_words

FOLDER = Path(__file__).parent
LIBRARIES = ("lib_base", "lib_jobs", "lib", "lib_pieces", "lib_spread", "lib_needs", "lib_sessions")
"""Not scripts: they stand before each of them, in this order."""
RARE = ("fail", "dead_letter", "dead_letter_damaged", "leave_to", "leave_to_others", "take_out_silent", "ask_for_moves")
"""Functions of the libraries that few calls need."""


@cache
def script_source(name: str, *preamble: str) -> str:
    """The text sent to Redis: the shared functions that the script needs, `preamble`, then the script.

    Redis creates every function of a text, and every variable that one shares with another, anew for each call, and
    collecting them is half of what a call costs. So comments name nothing that is needed, constants are written out,
    and RARE functions, with all that only they need, are created when one of them is called.
    """
    text = "".join(preamble) + _read(name)
    parts = _shared_parts()
    often = _needed(text, {names: part for names, part in parts.items() if names not in RARE})
    seldom = [names for names in _needed(text, parts) if names not in often]
    before, rare = "".join(parts[names] for names in often), [names for names in seldom if names in RARE]
    if rare:
        calls = re.compile(rf"\b({'|'.join(rare)})\(")
        before, text = (calls.sub(r"rarely('\1', ", some) for some in (before, text))
        made = "".join(parts[names] for names in seldom) + f"made = {{{', '.join(f'{it} = {it}' for it in rare)}}}\n"
        before = f"local rarely, made\n{before}rarely = function(name, ...)\nif not made then\n{made}end\n"
        before += "return made[name](...)\nend\n"
    text = before + text
    for line, constant, value in re.findall(r"^(local ([A-Z_]+) = ([\d.]+) *(?:--.*)?\n)", text, flags=re.MULTILINE):
        text = re.sub(rf"\b{constant}\b", value, text.replace(line, ""))
    return text


def _needed(text: str, parts: dict[str, str]) -> list[str]:
    """The keys of the parts that a text needs, in order."""
    found: list[str] = []
    for names, part in reversed(parts.items()):
        if re.search(rf"\b({names.replace(', ', '|')})\b", text):
            text, found = part + text, [names, *found]
    return found


def _read(name: str) -> str:
    """A file without its comments, and with what is in Redis in place of the words for it. Raises KeyError."""
    text = re.sub(r"^ *--.*\n", "", script_path(name).read_text(), flags=re.MULTILINE)
    words = script_words()
    return re.sub(r"\b[A-Z_]{2,}\b(\.\w+)?", lambda it: words[it[0]] if it[1] else words.get(it[0], it[0]), text)


@cache
def _shared_parts() -> dict[str, str]:
    """The libraries' definitions in order, by what they name. A part only uses parts before it."""
    shared = "".join(_read(library) + "\n" for library in LIBRARIES)
    parts = re.split(r"^(?=local )", shared, flags=re.MULTILINE)[1:]
    return {names: part for part in parts for names in re.findall(r"\Alocal (?:function )?([\w, ]*\w)", part)}


def script_names() -> list[str]:
    """The names of all scripts."""
    return sorted(path.stem for path in FOLDER.rglob("*.lua") if path.stem not in LIBRARIES)


@cache
def script_path(name: str) -> Path:
    """Where the script of that name is: each kind has a folder of its own. Raises KeyError."""
    return {path.stem: path for path in FOLDER.rglob("*.lua")}[name]
