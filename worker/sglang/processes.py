"""The processes of one SGLang engine: started from a thread that outlives them, watched, and ended without any others.

SGLang's own `shutdown` kills every child process of the calling process. A worker has others (an embedded Redis, an
RQ child), so this module remembers which ones are the engine's.

A scheduler imports what the worker's process imports, for ten seconds. :class:`EarlySchedulers` lets both do it at the
same time.
"""

from __future__ import annotations

import atexit
import io
import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import popen_spawn_posix, resource_tracker, spawn, util
from multiprocessing.context import SpawnProcess, reduction, set_spawning_popen  # type: ignore[attr-defined]
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any, TypeVar

from .wire import EARLY_CUDA, EARLY_GO

if TYPE_CHECKING:  # only [worker] has it, and everybody imports this room for what its door has
    import psutil

log = logging.getLogger(__name__)
KILL_TIMEOUT_S = 30.0
IMPORTS = (
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.distributed.tensor",
    "scipy.optimize",
    "openai.types.responses",
    "fastapi",
    "aiohttp",
    "zmq",
)
IMPORTS_WITHOUT_GPU = (
    "transformers.modeling_utils",
    "torchvision",
    "xgrammar",
    "compressed_tensors",
    "sglang.srt.managers.scheduler",
    "sglang.srt.models.registry",
)
"""The slowest of what a scheduler imports. Importing the second part may initialise CUDA where there is a GPU."""
T = TypeVar("T")


class EngineProcesses:
    """What one engine starts through `multiprocessing`, with everything those processes start in turn.

    The scheduler asks the kernel to kill it when the *thread* that started it ends. So :meth:`launch` runs on a thread
    of its own, which lives until :meth:`close`.
    """

    def __init__(self) -> None:
        self._others = set(multiprocessing.active_children())
        self._roots: set[BaseProcess] = set()
        self._descendants: set[psutil.Process] = set()
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sglang-launch", initializer=_deaf_to_interrupts)
        # multiprocessing's own exit handler waits for children. This one is registered later, so it runs before that.
        atexit.register(self.kill)

    def launch(self, function: Callable[[], T]) -> Future[T]:
        """Run `function`, which starts the processes, on the thread that owns them."""
        return self._thread.submit(function)

    def remember(self) -> None:
        """Note which processes exist now. Children of a process that is killed later are found only by this list."""
        with self._lock:
            self._roots |= set(multiprocessing.active_children()) - self._others
            for root in self._roots:
                self._descendants |= _tree(root)

    def ended(self) -> str | None:
        """Say which remembered process is gone, or return None while all of them run."""
        for root in self._roots:
            if root.exitcode is not None:
                return f"process {root.pid} ended with exit code {root.exitcode}"
        return None

    def kill(self) -> None:
        """End all of them and wait until they are gone: milliseconds, at most `KILL_TIMEOUT_S` seconds. Blocks."""
        import psutil  # noqa: PLC0415

        self.remember()
        with self._lock:
            for process in self._descendants:
                try:
                    process.kill()
                except psutil.NoSuchProcess:
                    pass
            for root in self._roots:
                root.join(KILL_TIMEOUT_S)
            psutil.wait_procs(self._descendants, timeout=KILL_TIMEOUT_S)
            self._descendants.clear()

    def close(self) -> None:
        """End everything, also the launching thread, which must be idle. Blocks as :meth:`kill` does."""
        self.kill()
        atexit.unregister(self.kill)
        self._thread.shutdown(wait=True)


def _deaf_to_interrupts() -> set[signal.Signals]:
    """Block SIGINT in this thread, and in what it starts from now on. Returns the mask that it had.

    A terminal sends Ctrl-C to every process. The worker ends those of its engine when their samples are handed back.
    """
    resource_tracker.ensure_running()  # starting it later would let SIGINT in again
    return signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # type: ignore[return-value]


def _tree(root: BaseProcess) -> set[psutil.Process]:
    import psutil  # noqa: PLC0415

    if root.pid is None or root.exitcode is not None:
        return set()
    try:
        process = psutil.Process(root.pid)
        return {process, *process.children(recursive=True)}
    except psutil.NoSuchProcess:
        return set()


# --- schedulers that import before they are needed --------------------------------------------------------------------


class EarlySchedulers:
    """Interpreters that import SGLang while this process does. Each then becomes one scheduler of the first engine.

    Nothing is forked. An early interpreter is started as `multiprocessing` starts a spawned process. It only imports
    before it reads what it is to run, instead of after that. It ends by itself when this process is gone, or was told
    that it is not needed.
    """

    def __init__(
        self, count: int, always: Sequence[str] = IMPORTS, without_gpu: Sequence[str] = IMPORTS_WITHOUT_GPU
    ) -> None:
        """Start `count` of them, which import `always` and, with a torch that has no CUDA, `without_gpu`.

        Call it before anything slow, on a thread that outlives the engine: the scheduler dies with it.

        A process that has SGLang imported has nothing to do meanwhile, and starts none.
        """
        self._waiting = [] if "sglang" in sys.modules else [_Early(always, without_gpu) for _ in range(count)]

    def process(self, *, target: Callable[..., Any], args: tuple[Any, ...]) -> BaseProcess:
        """Make the process that runs `target`: an early one if one is left, otherwise as `multiprocessing` makes it."""
        if not self._waiting:
            return multiprocessing.Process(target=target, args=args)
        return _EarlyProcess(self._waiting.pop(0), target, args)

    def close(self) -> None:
        """End those that were not needed."""
        while self._waiting:
            self._waiting.pop().kill()


class _Early:
    """One interpreter that imports, and waits. Its end of `control` is read by `inside.entry.begin_early`."""

    def __init__(self, always: Sequence[str], without_gpu: Sequence[str]) -> None:
        self.executable, self.preloaded = os.fsencode(spawn.get_executable()), _preloaded()
        self.control, control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sentinel, alive = os.pipe()
        pipe, self.parent = os.pipe()
        tracker: int = resource_tracker.getfd()  # type: ignore[assignment]
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; from {__package__}.inside.entry import begin_early; "
            f"begin_early({control.fileno()}, {pipe}, {tracker}, {always!r}, {without_gpu!r})"
        )
        options = util._args_from_interpreter_flags()  # type: ignore[attr-defined]
        command: list[Any] = [self.executable, *options, "-c", code, "--multiprocessing-fork"]
        inherited = [control.fileno(), alive, pipe, tracker]
        mask = _deaf_to_interrupts()
        try:
            self.pid: int = util.spawnv_passfds(self.executable, command, inherited)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        control.close()
        _close(alive, pipe)

    def usable(self) -> bool:
        """Wait for its imports. Returns False if what is to run needs an interpreter that begins anew.

        That is so for another executable (SGLang binds a process to its GPU's NUMA node by numactl), another library
        to be loaded first (torch-memory-saver), and an interpreter in which CUDA was initialised or that is gone.
        """
        if (os.fsencode(spawn.get_executable()), _preloaded()) != (self.executable, self.preloaded):
            return False
        try:
            told = self.control.recv(64)
        except OSError:
            told = b""
        return bool(told) and told != EARLY_CUDA

    def pass_on(self, descriptor: int) -> int:
        """Give it a copy of a file descriptor. Returns the copy's number."""
        socket.send_fds(self.control, [b"fd"], [descriptor])
        return int(self.control.recv(64))

    def kill(self) -> None:
        """End it, and give back what it holds here."""
        os.kill(self.pid, 9)
        os.waitpid(self.pid, 0)
        self.control.close()
        _close(self.sentinel, self.parent)


class _Popen(popen_spawn_posix.Popen):
    """A spawned process of `multiprocessing`, in an interpreter that is there already."""

    def __init__(self, early: _Early, process: BaseProcess) -> None:
        self._early = early
        super().__init__(process)

    def duplicate_for_child(self, fd: int) -> int:
        return self._early.pass_on(fd)

    def _launch(self, process_obj: BaseProcess) -> None:
        early, buffer = self._early, io.BytesIO()
        told = spawn.get_preparation_data(process_obj.name) | {"environment": _Environment()}
        set_spawning_popen(self)
        try:
            reduction.dump(told, buffer)
            reduction.dump(process_obj, buffer)
        finally:
            set_spawning_popen(None)
        self.pid, self.sentinel = early.pid, early.sentinel
        self.finalizer = util.Finalize(self, _close, (early.sentinel, early.parent))
        early.control.send(EARLY_GO)
        early.control.close()
        with open(early.parent, "wb", closefd=False) as pipe:
            pipe.write(buffer.getbuffer())


class _Environment:
    """This process' environment, which a spawned process would have from its start. Unpickling sets it."""

    def __reduce__(self) -> tuple[object, ...]:
        from .inside import set_environment  # noqa: PLC0415 – torch

        return set_environment, (dict(os.environ),)


class _EarlyProcess(SpawnProcess):
    def __init__(self, early: _Early, target: Callable[..., Any], args: tuple[Any, ...]) -> None:
        super().__init__(target=target, args=args)
        self._popen_of_early = early

    def __reduce__(self) -> Any:
        """Arrive as a plain process of `multiprocessing`."""
        state = {name: value for name, value in vars(self).items() if name != "_popen_of_early"}
        return SpawnProcess.__new__, (SpawnProcess,), state

    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        early: _Early = process_obj._popen_of_early
        if early.usable():
            log.info("the scheduler's imports were made early")
            return _Popen(early, process_obj)
        log.info("the scheduler starts anew: its early imports cannot be used")
        early.kill()
        return popen_spawn_posix.Popen(process_obj)


def _preloaded() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("LD_")}


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
