"""Limits this process, and runs the program on its standard input.

`python -I -S launcher.py CPU-SECONDS MEMORY-BYTES FILE-BYTES NAMESPACES`, the last one 1 or 0. It is run by
path, and imports nothing of the package.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys

NEW_PROCESSES, NEW_USER, NEW_IPC, NEW_NETWORK = 0x20000000, 0x10000000, 0x08000000, 0x40000000
PARENT_DEATH_SIGNAL = 1
OPEN_FILES = 64


def die_with_parent(libc: ctypes.CDLL) -> None:
    """Be killed when the process that started this one ends."""
    libc.prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)


def own_namespaces(libc: ctypes.CDLL) -> None:
    """Go on in a child that has a network and processes of its own. If it ends, all of its processes do."""
    if libc.unshare(NEW_USER | NEW_NETWORK | NEW_PROCESSES | NEW_IPC):
        raise OSError(ctypes.get_errno(), "unshare")
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        os._exit(code if code >= 0 else 128 - code)
    die_with_parent(libc)


def main() -> None:
    cpu_s, memory, file_size, namespaces = map(int, sys.argv[1:])
    code = sys.stdin.buffer.read().decode()
    libc = ctypes.CDLL(None, use_errno=True)
    if sys.platform == "linux":
        die_with_parent(libc)
    if namespaces:
        own_namespaces(libc)
    for kind, limit in (
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, file_size),
        (resource.RLIMIT_NOFILE, OPEN_FILES),
        (resource.RLIMIT_NPROC, 1),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (limit, limit))
    sys.argv = ["program"]
    exec(compile(code, "program", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    main()
