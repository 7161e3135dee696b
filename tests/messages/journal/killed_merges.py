"""Run by test_merge.py: the segments of a journal are merged by a process that is killed, once at each of its steps."""

import itertools
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

from rolloutmq.messages.journal import Entry, merge, read
from rolloutmq.messages.journal.segment import SegmentWriter

STEPS = ("open", "os.mkdir", "os.rename", "os.remove", "os.utime", "fcntl.flock")


def entries(folder: Path, complaints: list[str]) -> list[tuple[str, Any]]:
    return sorted((entry.job_id, entry.data["number"]) for entry in read(folder, on_problem=complaints.append))


def die_at(step: int) -> None:
    """Kill this process when it takes so many more steps; in the midst of a write, if that is one."""
    left = step
    write = SegmentWriter._write

    def count(event: str, _: Any) -> None:
        nonlocal left
        left -= event in STEPS
        if event in STEPS and left <= 0:  # the kill is an event, too
            os.kill(os.getpid(), signal.SIGKILL)

    def torn(self: SegmentWriter, data: bytes) -> None:
        if left == 1:
            write(self, data[: len(data) // 2])
        count("open", None)
        write(self, data)

    SegmentWriter._write = torn  # type: ignore[method-assign]
    sys.addaudithook(count)


def change(entry: Entry) -> Entry | None:
    return None if entry.event == "lost" else entry


made, work = Path(sys.argv[1]), Path(sys.argv[2])
complaints: list[str] = []
expected = entries(made, complaints)
torn = len(complaints)
for step in itertools.count(1):
    shutil.copytree(made, work)
    if (pid := os.fork()) == 0:
        die_at(step)
        merge(work, grace_s=0.0, change=change)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    complaints = []
    assert entries(work, complaints) == expected, step
    assert len(complaints) <= torn, complaints
    merge(work, grace_s=0.0, change=change)
    assert entries(work, []) == expected, step
    assert len(list(work.iterdir())) == 2, step  # the one segment, and the folder for the next one
    assert not list((work / ".merging").iterdir()), step
    shutil.rmtree(work)
    if status == 0:
        break
    assert os.WTERMSIG(status) == signal.SIGKILL
print(step)
