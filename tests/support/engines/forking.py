"""Processes of engines and workers that begin with everything imported.

Importing SGLang takes ten seconds of CPU, and an engine does it twice: in the process that starts it and in its
scheduler. Here one process imports everything, alone and without a thread, and is forked instead: for an engine's
processes after :func:`install`, and for a whole program such as `rolloutmq worker` by :class:`Forked`.

Who is whose child stays as it would be: a forked program forks a server of its own for its engine's processes, which
are below it, end with it and send their signals to it. Only the imports are saved.
"""

from __future__ import annotations

import atexit
import io
import multiprocessing
import multiprocessing.process
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing import forkserver, popen_forkserver, spawn, util
from multiprocessing.context import reduction, set_spawning_popen  # type: ignore[attr-defined]
from pathlib import Path
from typing import Any

import pytest
import torch

USABLE = not torch.backends.cuda.is_built()
"""A fork of a process that has asked for its GPUs could not use them; where there may be some all is spawned."""
TESTS = Path(__file__).parents[2]
ALONE = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "SGLANG_RETURN_ORIGINAL_LOGPROB": "1",
    "TQDM_DISABLE": "1",
}
"""For the process that imports: no threads, and what SGLang reads from the environment while it is imported."""
_server = forkserver.ForkServer()
"""Of this process: the one that imports, or in a forked process a fork of that."""


class _Popen(popen_forkserver.Popen):
    """As the original, from `_server`, with this process' environment."""

    def _launch(self, process_obj: Any) -> None:
        data, buffer = spawn.get_preparation_data(process_obj._name), io.BytesIO()
        set_spawning_popen(self)
        try:
            reduction.dump(data | {"environment": _Environment()}, buffer)
            reduction.dump(process_obj, buffer)
        finally:
            set_spawning_popen(None)
        self.sentinel, to_child = _server.connect_to_new_process(self._fds)
        self.finalizer = util.Finalize(self, util.close_fds, (os.dup(to_child), self.sentinel))
        with open(to_child, "wb") as pipe:
            pipe.write(buffer.getbuffer())
        self.pid = forkserver.read_signed(self.sentinel)


class _Environment:
    """Unpickled before anything else in the process that was forked."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _begin, (dict(os.environ),)


def _begin(environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    original = forkserver._forkserver  # type: ignore[attr-defined]
    os.close(original._forkserver_alive_fd)  # a fork server lives as long as its user, not as what it forked
    original._forkserver_alive_fd = original._forkserver_address = None
    global _server  # noqa: PLW0603
    _server = forkserver.ForkServer()


def install() -> None:
    """Processes that `multiprocessing` starts by default, such as an engine's, are forked from now on."""
    if not USABLE:
        return
    multiprocessing.Process._Popen = staticmethod(_Popen)  # type: ignore[attr-defined]
    _ensure_server()


def _ensure_server() -> None:
    if _server._forkserver_pid is not None:
        return
    _server.set_forkserver_preload(["support.engines.imported"])
    path = [str(TESTS), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**ALONE, "PYTHONPATH": os.pathsep.join(path)}.items():
            patch.setenv(name, value)
        _server.ensure_running()


def _fork_server() -> None:
    """In a forked process that has no thread yet: a server for its own engine."""
    address = f"\0rolloutmq-tests-{secrets.token_hex(8)}"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    alive, held = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            os.close(held)
            forward_sigquit()
            forkserver.main(listener.detach(), alive, None)
        finally:
            os._exit(0)
    os.close(alive)
    listener.close()
    _server._forkserver_address, _server._forkserver_alive_fd, _server._forkserver_pid = address, held, pid


def forward_sigquit() -> None:
    """SGLang's processes tell their parent of a failure this way: of a fork server's, its user is meant."""
    signal.signal(signal.SIGQUIT, lambda *_: os.kill(os.getppid(), signal.SIGQUIT))


class Forked:
    """A program in a session of its own, as far as it is needed the `subprocess.Popen` of it. log: gets its output."""

    def __init__(self, program: Callable[..., None], *arguments: Any, log: Path | None = None) -> None:
        install()
        context = multiprocessing if USABLE else multiprocessing.get_context("spawn")
        self._process = context.Process(target=_run, args=(program, arguments, log))
        self._process.start()
        multiprocessing.process._children.discard(self._process)  # type: ignore[attr-defined]  # of no engine here
        self.pid: int = self._process.pid  # type: ignore[assignment]
        while self.poll() is None and os.getsid(self.pid) != self.pid:
            time.sleep(0.001)

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("a forked program", timeout or 0.0)
        return self.returncode

    def terminate(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)


def _run(program: Callable[..., None], arguments: tuple[Any, ...], log: Path | None) -> None:
    os.setsid()
    if log is not None:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.close(file)
    if USABLE:
        _fork_server()
    install()
    try:
        program(*arguments)
    finally:
        atexit._run_exitfuncs()


def command_line(*arguments: str) -> None:
    """The program `rolloutmq`."""
    from rolloutmq.ops.entry import main  # noqa: PLC0415

    sys.argv = ["rolloutmq", *arguments]
    main()
