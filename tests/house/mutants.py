"""Each mutant breaks one promise of the package in one place, and names the test that must fail then: mutants.toml.

`python tests/house/mutants.py` runs them all; ONLY=claim,books those with such a text in their file or test, JOBS=4 so
many at the same time. Exits with the number of mutants that no test has killed. Nothing is written into the checkout: a
process that has imported all tests is forked for each mutant, which is put into the text of a script, or into the
functions of a module. So a mutant costs little more than its test, which must not need other processes for it.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from functools import cache
from multiprocessing import connection, get_context
from pathlib import Path
from types import CodeType, FunctionType

import pytest

ROOT = Path(__file__).resolve().parents[2]
MUTANTS: list[dict[str, str]] = tomllib.loads((Path(__file__).parent / "mutants.toml").read_text())["mutant"]
QUIET = ("-q", "-x", "--tb=short", "--timeout=120", "-p", "no:cacheprovider")
RAN = 10
"""Is added to pytest's exit status: 1 is any failure of a process. A time that is over ends it with that."""


def put_in(file: Path, text: str, becomes: str) -> None:
    """Make this process run the file with `becomes` in place of `text`."""
    read = Path.read_text
    original = file.read_text()
    changed = original.replace(text, becomes)
    if file.suffix == ".lua":
        Path.read_text = lambda path, *a, **kw: changed if path.resolve() == file else read(path, *a, **kw)  # type: ignore
        return
    pairs = zip(codes(compile(original, file, "exec")), codes(compile(changed, file, "exec")), strict=True)
    new = {(old.co_qualname, old.co_firstlineno): code for old, code in pairs}
    place = cache(os.path.realpath)  # the package may have been imported through a link
    found = [it for it in gc.get_objects() if type(it) is FunctionType and place(it.__code__.co_filename) == str(file)]
    assert found, f"no function of {file} has been imported"
    for one in found:
        one.__code__ = new[one.__code__.co_qualname, one.__code__.co_firstlineno]


def codes(code: CodeType) -> Iterator[CodeType]:
    """The code of a module's functions, in order."""
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield one
            yield from codes(one)


def run(mutant: dict[str, str], number: int, output: Path) -> None:
    """In a process of its own, which exits as pytest does."""
    with output.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ["PYTEST_XDIST_WORKER"] = f"gw{number % 16}"  # ports of its own for its servers, see conftest.py
    put_in(ROOT / mutant["file"], mutant["text"], mutant["becomes"])
    sys.exit(RAN + pytest.main([mutant["test"], *QUIET]))


def main(folder: Path) -> int:
    only, jobs = os.environ.get("ONLY", "").split(","), int(os.environ.get("JOBS", os.cpu_count() or 1))
    chosen = [it for it in MUTANTS if any(name in it["file"] or name in it["test"] for name in only)]
    os.chdir(ROOT)
    pytest.main([*{it["test"] for it in chosen}, "--collect-only", *QUIET])
    left, running, survived = list(enumerate(chosen)), {}, 0
    while left or running:
        while left and len(running) < jobs:
            number, mutant = left.pop(0)
            process = get_context("fork").Process(target=run, args=(mutant, number, folder / str(number)))
            process.start()
            running[process.sentinel] = process, mutant, time.monotonic(), folder / str(number)
        for ended in connection.wait(list(running)):
            process, mutant, began, output = running.pop(ended)
            process.join()
            said = {RAN: "SURVIVED", RAN + 1: "killed"}.get(process.exitcode, f"NO TEST RAN ({process.exitcode})")
            told = f"{said:8} {time.monotonic() - began:5.1f} s  {mutant['breaks']}: {mutant['file']}, {mutant['test']}"
            print(told if said == "killed" else f"{told}\n{output.read_text()}", flush=True)
            survived += said != "killed"
    print(f"{len(chosen)} mutants, {survived} not killed")
    return survived


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="mutants-") as made:
        sys.exit(main(Path(made)))
