"""Python as it is where only some extras are installed: what their requirements do not bring cannot be imported."""

from __future__ import annotations

import importlib.abc
import importlib.metadata
import json
import sys
import tomllib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import ModuleType

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]


class Missing(importlib.abc.MetaPathFinder):
    """Says of these top-level modules that there are none."""

    def __init__(self, hidden: Sequence[str]) -> None:
        self.hidden = frozenset(hidden)

    def find_spec(self, name: str, path: object = None, target: ModuleType | None = None) -> None:
        if name.partition(".")[0] in self.hidden:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


@cache
def hidden(extras: tuple[str, ...]) -> list[str]:
    """The installed top-level modules that a package with these extras would not have."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = [*project["dependencies"], *(it for extra in extras for it in project["optional-dependencies"][extra])]
    todo, there = [Requirement(text) for text in texts], {("rolloutmq", "")}
    while todo:
        wanted = todo.pop()
        name = canonicalize_name(wanted.name)
        for extra in {"", *wanted.extras}:
            if (name, extra) in there:
                continue
            there.add((name, extra))
            if name == "rolloutmq":
                needed = project["optional-dependencies"][extra]
            else:
                needed = importlib.metadata.requires(name) or ()
            further = map(Requirement, needed)
            todo += [it for it in further if it.marker is None or it.marker.evaluate({"extra": extra})]
    names = {name for name, _ in there}
    return sorted(
        module
        for module, distributions in importlib.metadata.packages_distributions().items()
        if not names & set(map(canonicalize_name, distributions)) and module not in sys.stdlib_module_names
    )


def command(extras: Sequence[str], *words: str) -> list[str]:
    """The arguments of a process that runs a `rolloutmq` command where these extras alone are installed."""
    code = (
        "import json, sys; sys.path.insert(0, sys.argv.pop(1)); from support.extras import Missing; "
        "sys.meta_path.insert(0, Missing(json.loads(sys.argv.pop(1)))); sys.argv[0] = 'rolloutmq'; "
        "[sys.modules.pop(name) for name in list(sys.modules) if name.startswith('packaging')]; "
        "from rolloutmq.ops.entry import main; main()"
    )
    return [sys.executable, "-c", code, str(ROOT / "tests"), json.dumps(hidden(tuple(extras))), *words]
