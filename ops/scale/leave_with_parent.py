"""Become a command that leaves when its parent dies. A script of its own: standard library only.

    python -I -S leave_with_parent.py PARENT_PID LEAVE_S COMMAND ARG...

It gets SIGTERM when its parent dies, so a worker drains when the scaler that started it was killed. The kernel sends
the signal when the thread ends that has started this process, so a scaler starts workers from its main thread. A guard
of the same process group kills what of the group is left LEAVE_S seconds later, and what the command leaves behind when
it ends. Elsewhere than on Linux the command only runs.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys

PR_SET_PDEATHSIG = 1


def guard(parent_fd: int, command: int, leave_s: float) -> None:
    """Wait until the command has ended, or was to end, and kill its group, this process included."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        os.dup2(nowhere, fd)
    try:
        command_fd = os.pidfd_open(command)
    except ProcessLookupError:
        return
    ends = select.poll()
    ends.register(parent_fd, select.POLLIN)
    ends.register(command_fd, select.POLLIN)
    if command_fd not in [fd for fd, _ in ends.poll()]:
        ends.unregister(parent_fd)
        ends.poll(leave_s * 1000)


if __name__ == "__main__":
    parent, leave, words = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
    if sys.platform == "linux":
        try:
            watched = os.pidfd_open(parent)
        except ProcessLookupError:
            sys.exit(0)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it died before this was said
            sys.exit(0)
        me = os.getpid()
        if not os.fork():
            if not os.fork():  # nobody's child, so that the command has none that it does not know
                guard(watched, me, leave)
                os.killpg(0, signal.SIGKILL)
            os._exit(0)
        os.wait()
    os.execvp(words[0], words)
