"""How tests are collected, in which order they run, and which of them in one process (`pytest -n 2`).

A file stays in one process, with the servers of its fixtures. The tests whose process imports SGLang are all in
one process, and share its engine; those of pools are all in another, and share its engine and worker. These two
compute, and meanwhile the other tests wait for each other. What takes longest begins first: what begins last decides
how long the other processes wait.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

ENGINES = "tests/worker/sglang/"
POOLS = "tests/worker/sglang/pools/"
"""Their engines are in processes of their own."""
DOCUMENTATION = "tests/house/test_docs_blocks.py"
"""Has a pool, too."""
TRAINERS = "tests/producer/trl/"
"""They share one."""
SCORES = "tests/ops/replay/checks/test_score_engine.py"
"""Asks the engine with a tokenizer, which those of pools share."""
LONG = (
    "test_state_machine", "test_kills", "test_operations", "test_commands_serving", "test_cluster", "test_restart",
    "test_publish_faults", "test_skyrl_weights", "test_disk_crash", "test_torchrun",
    "test_chaos_sabotage", "test_bench_sync", "test_bench_engine", "test_gather",
)  # fmt: skip
"""Modules that take longest of those without an engine."""
SEPARATE = "tests/house/test_chaos_sabotage.py"
"""Minutes of tests that share nothing: each goes to the process that is free."""
ENDING = ("test_sglang_engine", "test_engine_ops")
"""Modules that end the engine that they share, or the worker."""


def pytest_collect_directory(path: Path, parent: pytest.Collector) -> pytest.Dir | None:
    """The checkout, which is a package, as a plain folder.

    pytest imports a package that it collects from. For that it puts the folder around the checkout on sys.path, where a
    folder called `sglang` would be taken for SGLang.
    """
    if path == parent.config.rootpath:
        return pytest.Dir.from_parent(parent, path=path)
    ours = path.is_relative_to(parent.config.rootpath / "tests") and not (path / "__init__.py").exists()
    return Shared.from_parent(parent, path=path) if ours else None


class Shared(pytest.Dir):
    """A folder in which each test process begins with other files.

    Every process imports every file. The first one to do so rewrites its asserts, which is half of the work, and the
    others find the result in `__pycache__`.
    """

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        found = list(super().collect())
        process, processes = (
            int(os.environ.get(f"PYTEST_XDIST_WORKER{what}", "0").lstrip("gw")) for what in ("", "_COUNT")
        )
        first = len(found) * process // max(1, processes)
        return found[first:] + found[:first]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: (rank(item.nodeid), stage(item), item.path.parts))


def rank(nodeid: str) -> int:
    """Of a test's file; the lowest begins first."""
    if nodeid.startswith((DOCUMENTATION, TRAINERS, SCORES)):
        return 1
    if nodeid.startswith(ENGINES):
        return 1 if nodeid.startswith(POOLS) else 0
    return 2 if nodeid.partition(".py")[0].endswith(LONG) else 3


def stage(item: pytest.Item) -> int:
    """What uses the shared engine comes last: a process can have one engine at a time, and other modules start theirs.

    What ends the life of something shared is the very last. A test that asks for the engine as it runs
    (getfixturevalue) has the marker `shared_engine`.
    """
    module = getattr(item, "module", None)
    asks = "engine" in getattr(item, "fixturenames", ()) or item.get_closest_marker("shared_engine") is not None
    shared = asks and not hasattr(module, "engine")
    return shared + 2 * (getattr(module, "__name__", "") in ENDING)


def unit(nodeid: str) -> str:
    """Tests of one unit run in one process."""
    if nodeid.startswith(SEPARATE):
        return nodeid
    place = rank(nodeid)
    return (ENGINES, POOLS)[place] if place < 2 else nodeid.partition("::")[0]


class Xdist:
    """Hooks of pytest-xdist, registered where there is one."""

    @pytest.hookimpl
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> Any:
        from xdist.scheduler import LoadFileScheduling  # noqa: PLC0415

        config.option.loadscopereorder = False  # else the files with most tests begin first
        scheduler = LoadFileScheduling(config, log)
        scheduler._split_scope = unit
        return scheduler


def pytest_configure(config: pytest.Config) -> None:
    if config.pluginmanager.hasplugin("xdist"):
        config.pluginmanager.register(Xdist())
