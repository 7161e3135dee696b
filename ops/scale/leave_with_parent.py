"""Become a command that gets SIGTERM when its parent dies. A script of its own: standard library only.

    python -I -S leave_with_parent.py PARENT_PID COMMAND ARG...

So a worker drains when the scaler that started it was killed, and nothing is left behind. The kernel sends the signal
when the thread ends that has started this process, so a scaler starts workers from its main thread. Elsewhere than on
Linux the command only runs.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it died before this was said
            sys.exit(0)
    os.execvp(command[0], command)
