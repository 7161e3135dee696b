"""The rooms of the house: who may import whom, through which door, without circles, and how many files a room has.

The rules are in imports.toml. An entry is a room (`sync/wire`), a module (`worker/config`), or one of the top folders
(`messages`), which stands for everything below it.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOP = ("messages", "sync", "producer", "worker", "ops")
FEWEST, MOST = 4, 14
EXCUSE = re.compile(r"^(Few|Many) files: \S", re.MULTILINE)


@dataclass(frozen=True)
class Import:
    """One imported name. target: a file of the package, as `sync/wire/group`, or a folder, whose door it is."""

    file: str
    line: int
    target: str
    name: str

    def __str__(self) -> str:
        return f"{self.file}.py:{self.line}: {self.target} ({self.name})"


class House:
    """The package's files and imports, and the table."""

    def __init__(self, root: Path, table: Mapping[str, Iterable[str]]) -> None:
        self.root = root
        paths = [path for top in TOP for path in (root / top).rglob("*.py")]
        self.doors = {str(path.parent.relative_to(root)): path for path in paths if path.name == "__init__.py"}
        self.files = {str(path.relative_to(root).with_suffix("")): path for path in paths if path.name != "__init__.py"}
        self.table = {room: frozenset(allowed) for room, allowed in table.items()}

    def room(self, target: str) -> str:
        """The folder of a file; a folder is itself."""
        return target if target in self.doors else target.rpartition("/")[0]

    def imports(self, file: str) -> Iterator[Import]:
        """Every import of another file of the package: inside functions and under TYPE_CHECKING too."""
        path = self.doors[file] if file in self.doors else self.files[file]
        package = path.relative_to(self.root).parent.parts
        for node in ast.walk(ast.parse(path.read_text(), str(path))):
            names = [name.name for name in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            if isinstance(node, ast.Import) or (isinstance(node, ast.ImportFrom) and node.level == 0):
                module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
                yield from (
                    Import(file, node.lineno, "absolute", name)
                    for name in names
                    if (module or name).split(".")[0] == "rolloutmq"
                )
            elif isinstance(node, ast.ImportFrom):
                above = package[: len(package) - node.level + 1]
                base = "/".join([*above, *(node.module or "").split(".")]).strip("/")
                for name in names:
                    inner = f"{base}/{name}".strip("/")
                    target = inner if inner in self.files or inner in self.doors else base
                    if target in self.files or target in self.doors:
                        yield Import(file, node.lineno, target, name)

    def may_import(self, room: str, target: str) -> bool:
        """Whether the table lets files of `room` import `target`."""
        allowed = self.table.get(room, frozenset())
        return bool(allowed & {target, self.room(target)}) or target.split("/", maxsplit=1)[0] in allowed & set(TOP)

    def offences(self, file: str) -> Iterator[str]:
        room = self.room(file)
        for found in self.imports(file):
            there = self.room(found.target)
            if found.target == "absolute":
                yield f"{found}: inside the package imports are relative"
            elif there == room:
                if found.target in self.doors and file not in self.doors and found.name not in self._modules(room):
                    yield f"{found}: a room does not go through its own door"
            elif file in self.doors and found.target.startswith(f"{file}/"):
                continue  # what a top folder's door offers of its rooms
            elif not self.may_import(room, found.target):
                yield f"{found}: {room} may not import {there}"
            elif found.target in self.doors:
                if found.name not in self.offered(there):
                    yield f"{found}: not in the door's __all__"
            elif there not in TOP and not self._offers_module(there, found) and found.target not in self.table[room]:
                yield f"{found}: not through the door of {there}"

    def offered(self, room: str) -> list[str]:
        """`__all__` of a door."""
        for node in ast.parse(self.doors[room].read_text()).body:
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
                return [str(item) for item in ast.literal_eval(node.value)]
        return []

    def _offers_module(self, room: str, found: Import) -> bool:
        """Whether it is a whole module that the door has in `__all__`."""
        return found.target == f"{room}/{found.name}" and found.name in self.offered(room)

    def _modules(self, room: str) -> set[str]:
        return {file.rpartition("/")[2] for file in self.files if self.room(file) == room}

    def circle(self) -> list[str]:
        """The files of one circle of imports, or nothing."""
        graph = {
            file: {found.target for found in self.imports(file) if found.target not in ("absolute", file)}
            for file in [*self.files, *self.doors]
        }
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            return list(error.args[1])
        return []


HOUSE = House(ROOT, tomllib.loads((ROOT / "imports.toml").read_text()))


def test_every_room_has_a_row_in_the_table() -> None:
    assert set(HOUSE.table) == set(HOUSE.doors)
    known = set(HOUSE.doors) | set(HOUSE.files)
    assert {entry for allowed in HOUSE.table.values() for entry in allowed} <= known
    page = (ROOT / "docs" / "architecture.md").read_text()
    assert set(re.findall(r"^\| `([a-z_/]+)` \| [^|]+ \|$", page, re.MULTILINE)) == set(HOUSE.doors)


def test_every_room_is_in_the_package() -> None:
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert set(packages) == {"rolloutmq", *(f"rolloutmq.{room.replace('/', '.')}" for room in HOUSE.doors)}


def test_imports_are_those_of_the_table_and_go_through_doors() -> None:
    assert [text for file in [*HOUSE.files, *HOUSE.doors] for text in HOUSE.offences(file)] == []


def test_there_is_no_circle_of_imports() -> None:
    assert HOUSE.circle() == []


@pytest.mark.parametrize("room", sorted(HOUSE.doors))
def test_a_room_has_one_door_one_sentence_and_a_size(room: str) -> None:
    tree = ast.parse(HOUSE.doors[room].read_text())
    said = ast.get_docstring(tree) or ""
    assert said.split("\n\n")[0].rstrip().endswith("."), "a sentence that says what the room does"
    assert "__all__" in HOUSE.doors[room].read_text() or room == "ops"
    files = 1 + len(HOUSE._modules(room))
    if not FEWEST <= files <= MOST:
        assert EXCUSE.search(said), f"{files} files, and the door does not say why"


def _made_up(root: Path, files: dict[str, str], table: Mapping[str, Iterable[str]]) -> House:
    for name, text in files.items():
        path = root / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        (path.parent / "__init__.py").touch()
        path.write_text(text)
    return House(root, table)


TABLE = {
    "messages": [],
    "sync": ["messages"],
    "sync/wire": ["messages", "sync/disk/errors"],
    "sync/disk": ["messages"],
    "ops": ["messages", "sync"],
}


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("from ...messages import ids", ""),
        ("from . import group", ""),
        ("from .group import Group", ""),
        ("import redis.asyncio", ""),
        ("from ..disk.errors import Broken", ""),
        ("from ..disk import errors", ""),
        ("from ..disk import Store", "sync/wire may not import sync/disk"),
        ("from ..disk.store import Store", "sync/wire may not import sync/disk"),
        ("from ...ops import cli", "sync/wire may not import ops"),
        ("def f():\n    from ...ops.cli import app", "sync/wire may not import ops"),
        ("if TYPE_CHECKING:\n    from ...ops.cli import app", "sync/wire may not import ops"),
        ("from . import Group", "a room does not go through its own door"),
        ("import rolloutmq.messages", "relative"),
        ("from rolloutmq.messages import ids", "relative"),
    ],
)
def test_the_rule_sees_every_form(statement: str, said: str, tmp_path: Path) -> None:
    files = {"sync/wire/made_up": statement, "sync/wire/group": "", "sync/disk/store": "", "sync/disk/errors": ""}
    files |= {"messages/ids": "", "ops/cli": ""}
    found = list(_made_up(tmp_path, files, TABLE).offences("sync/wire/made_up"))
    assert len(found) == bool(said)
    assert said in "".join(found)


def test_the_rule_sees_doors(tmp_path: Path) -> None:
    files = {"ops/cli": "from ..sync.wire import Group\nfrom ..sync.wire.group import Group", "sync/wire/group": ""}
    house = _made_up(tmp_path, files, TABLE)
    assert [text.rpartition(": ")[2] for text in house.offences("ops/cli")] == [
        "not in the door's __all__",
        "not through the door of sync/wire",
    ]
    house.doors["sync/wire"].write_text('from .group import Group\n__all__ = ["Group"]')
    assert [text.rpartition(": ")[2] for text in house.offences("ops/cli")] == ["not through the door of sync/wire"]


def test_the_rule_sees_circles(tmp_path: Path) -> None:
    circle = {"sync/a": "def f():\n    from .b import x", "sync/b": "if TYPE_CHECKING:\n    from .a import y"}
    assert set(_made_up(tmp_path, circle, TABLE).circle()) == {"sync/a", "sync/b"}
    assert _made_up(tmp_path, {"sync/b": ""}, TABLE).circle() == []


@pytest.mark.parametrize("module", ["rolloutmq", "rolloutmq.messages", "rolloutmq.producer"])
def test_a_trainer_imports_nothing_heavy(module: str) -> None:
    heavy = ["torch", "sglang", "transformers", "typer", "rich"]
    script = f"import sys, {module}; print([name for name in {heavy} if name in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"
