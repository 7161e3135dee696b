"""Interpreters that import before they are needed, and then run what `multiprocessing` would start."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection

import psutil
import pytest

from rolloutmq.worker.sglang.processes import EarlySchedulers, EngineProcesses

MARK = "ROLLOUTMQ_TEST_MARK"


def tell(connection: Connection) -> None:
    """What an early process runs here."""
    connection.send((os.getpid(), os.environ.get(MARK), "textwrap" in sys.modules, signal.getsignal(signal.SIGINT)))
    sys.exit(3)


def made(pids: set[int]) -> int:
    """The pid of the one child that is not among these."""
    tracker = multiprocessing.resource_tracker._resource_tracker._pid  # type: ignore[attr-defined]
    (found,) = {child.pid for child in psutil.Process().children()} - pids - {tracker}
    return found


@pytest.fixture
def children() -> set[int]:
    """Children that were there before."""
    multiprocessing.resource_tracker.ensure_running()  # type: ignore[attr-defined]
    return {child.pid for child in psutil.Process().children()}


def run(early: EarlySchedulers) -> tuple[int, str | None, bool, object]:
    reader, writer = multiprocessing.Pipe(duplex=False)
    process = early.process(target=tell, args=(writer,))
    process.start()
    assert process in multiprocessing.active_children()
    writer.close()
    told: tuple[int, str | None, bool, object] = reader.recv()
    process.join()
    assert process.exitcode == 3
    return told


@pytest.fixture
def early(monkeypatch: pytest.MonkeyPatch, children: set[int]) -> Iterator[EarlySchedulers]:
    """One interpreter, in a process that has not imported SGLang."""
    monkeypatch.delitem(sys.modules, "sglang", raising=False)
    found = EarlySchedulers(1, always=("textwrap", "no_such_module"), without_gpu=())
    yield found
    found.close()


def test_it_runs_what_it_is_told_with_the_environment_of_that_moment(
    early: EarlySchedulers, children: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = made(children)
    monkeypatch.setenv(MARK, "later")
    assert run(early) == (pid, "later", True, signal.default_int_handler)
    assert {child.pid for child in psutil.Process().children()} == children
    assert run(early)[0] != pid  # a second one is started as always


def survive(connection: Connection) -> None:
    signal.raise_signal(signal.SIGINT)
    connection.send("went on")


@pytest.mark.parametrize("begun", ["early", "anew"])
def test_what_a_terminal_sends_at_ctrl_c_is_the_workers_alone(early: EarlySchedulers, begun: str) -> None:
    if begun == "anew":
        early.close()
    reader, writer = multiprocessing.get_context("spawn").Pipe(duplex=False)
    process, processes = early.process(target=survive, args=(writer,)), EngineProcesses()
    try:
        processes.launch(process.start).result()
        writer.close()
        assert reader.recv() == "went on"
    finally:
        processes.close()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert signal.SIGINT not in before, "the worker hears it"


@pytest.mark.parametrize("why", ["another library", "killed"])
def test_one_that_cannot_be_used_is_replaced(
    early: EarlySchedulers, children: set[int], monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    pid = made(children)
    if why == "killed":
        psutil.Process(pid).kill()
    else:
        monkeypatch.setenv("LD_BIND_NOW", "1")
    assert run(early)[0] != pid
    assert {child.pid for child in psutil.Process().children()} == children


def test_one_that_is_not_needed_ends(early: EarlySchedulers, children: set[int]) -> None:
    process = psutil.Process(made(children))
    early.close()
    assert not process.is_running()


def test_one_whose_worker_dies_ends() -> None:
    code = "from rolloutmq.worker.sglang.processes import *; EarlySchedulers(1, (), ()); print(1, flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1) as worker:
        assert worker.stdout is not None
        worker.stdout.readline()
        children = psutil.Process(worker.pid).children()
        assert children
        worker.kill()
        _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive


def test_a_process_that_has_sglang_imported_starts_none(children: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sglang", sys)
    EarlySchedulers(1, (), ())
    assert {child.pid for child in psutil.Process().children()} == children
