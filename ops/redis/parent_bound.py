"""Run a command that cannot outlive the process that asked for it. A script of its own: standard library only.

    python -I -S parent_bound.py PARENT_PID REMOVE_DIR COMMAND ARG...

Prints the command's pid, then waits; what the command writes goes to this script's stderr. The command is killed as
soon as PARENT_PID is gone or closes this script's stdin, however it went: returned, crashed, SIGKILLed, out of memory;
then REMOVE_DIR (empty: none) is deleted. SIGTERM asks the command to end, even one that SIGSTOP froze; SIGUSR1 kills
it. The exit status is the command's, 128 + signal where a signal ended it.

Why a process in between, and not PR_SET_PDEATHSIG set in the command by its user: that signal fires when the *thread*
that forked ends, so a server started from a worker thread (`asyncio.to_thread`) would die with it. This script's main
thread lives as long as the script, so here the same call is exact, and it covers the death of the script itself.
A pidfd watches the parent; the stdin pipe does where there is none, but alone it would be held open by the parent's
forked children.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import threading

PR_SET_PDEATHSIG = 1


def _run(parent: int, remove_dir: str, command: list[str]) -> int:
    me = os.getpid()
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None

    def die_with_me() -> None:
        if libc is not None:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != me:  # this script died between fork and prctl
                os._exit(1)

    # No thread runs yet, so what preexec_fn is unsafe with is not there.
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=2, preexec_fn=die_with_me)  # noqa: PLW1509

    def end(*_: object) -> None:
        child.terminate()
        child.send_signal(signal.SIGCONT)  # a frozen command gets its SIGTERM only once it runs again

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGUSR1, lambda *_: child.kill())
    parent_gone = threading.Event()

    def watch_parent() -> None:
        watched: list[int] = [0]
        try:
            watched.append(os.pidfd_open(parent))
        except (AttributeError, OSError):  # not Linux, or an old kernel; a parent that is gone shows in getppid()
            pass
        if os.getppid() == parent:
            select.select(watched, [], [])
        parent_gone.set()
        child.kill()

    threading.Thread(target=watch_parent, daemon=True).start()
    with contextlib.suppress(OSError):  # the reader may be gone already
        print(child.pid, flush=True)
    code = child.wait()
    if remove_dir and parent_gone.is_set():
        shutil.rmtree(remove_dir, ignore_errors=True)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    # _exit: the watching thread may still be inside select(), nothing else is left to flush or close.
    os._exit(_run(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
