"""The processes of one SGLang engine: started from a thread that outlives them, watched, and ended without any others.

SGLang's own `shutdown` kills every child process of the calling process. A worker has others (an embedded Redis, an
RQ child), so this module remembers which ones are the engine's.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:  # only [worker] has it, and everybody imports this room for what its door has
    import psutil

log = logging.getLogger(__name__)
KILL_TIMEOUT_S = 30.0
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


def _deaf_to_interrupts() -> None:
    """Block SIGINT in this thread, and in what it starts from now on.

    A terminal sends Ctrl-C to every process. The worker ends those of its engine when their samples are handed back.
    """
    resource_tracker.ensure_running()  # starting it later would let SIGINT in again
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


def _tree(root: BaseProcess) -> set[psutil.Process]:
    import psutil  # noqa: PLC0415

    if root.pid is None or root.exitcode is not None:
        return set()
    try:
        process = psutil.Process(root.pid)
        return {process, *process.children(recursive=True)}
    except psutil.NoSuchProcess:
        return set()
