"""A process that forks writers and kills them; run by test_disk_crash.py, as pytest's own process is no place to fork.

`every FOLDER`: a writer is killed before each of its system calls in turn.
`random FOLDER SEED ROUNDS`: writers are killed at random times.
`traffic FOLDER VERSIONS`: nobody is killed; writers, readers and collectors use one folder at the same time.
"""

from __future__ import annotations

import fcntl
import os
import random
import select
import signal
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

import torch
from support.peers.disk_weights import check_versions, leftovers, snapshot

from rolloutmq.sync.disk.store import NoSuchSnapshot, SnapshotStore

CALLS = ((os, "open"), (os, "mkdir"), (os, "rename"), (os, "fsync"), (os, "unlink"), (os, "rmdir"), (fcntl, "flock"))
FIRST, THEN, LAST = 1, 2, 3


def die_before(call: int) -> list[int]:
    """Kill this process before its `call`-th system call from now on; the list counts them."""
    count = [0]

    def counting(original: Any) -> Any:
        def called(*args: Any, **more: Any) -> Any:
            count[0] += 1
            if count[0] == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **more)

        return called

    for module, name in CALLS:
        setattr(module, name, counting(getattr(module, name)))
    return count


def fork(work: Any) -> int:
    if pid := os.fork():
        return pid
    code = 1
    try:
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def every(folder: Path) -> None:
    """keep=1: the save of THEN writes, publishes, and removes FIRST."""
    killed = 0
    while True:
        store = SnapshotStore(folder / str(killed), keep=1)
        store.save(snapshot(FIRST))
        version = snapshot(THEN)

        def work(store: SnapshotStore = store, version: Any = version, call: int = killed + 1) -> None:
            die_before(call)
            store.save(version)

        _, status = os.waitpid(fork(work), 0)
        found = check_versions(store, folder / str(killed))
        assert found in ([FIRST], [FIRST, THEN], [THEN]), found
        store.save(snapshot(LAST))  # a dead writer is in nobody's way, and what it has left goes
        assert check_versions(store, folder / str(killed)) == [LAST]
        assert leftovers(folder / str(killed)) == []
        if os.waitstatus_to_exitcode(status) == 0:
            print(killed)
            return
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
        killed += 1


def at_random(folder: Path, seed: int, rounds: int) -> None:
    chance, version = random.Random(seed), 1
    store = SnapshotStore(folder, keep=2)
    for _ in range(rounds):
        ready, begun = os.pipe()

        def work(version: int = version, begun: int = begun) -> NoReturn:
            os.write(begun, b"!")
            while True:
                store.save(snapshot(version))
                version += 1

        pid = fork(work)
        assert os.read(ready, 1) == b"!"
        select.select([], [], [], chance.uniform(0, 0.1))
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
        os.close(ready)
        os.close(begun)
        version = max(check_versions(store, folder), default=0) + 1
    store.save(snapshot(version))
    assert leftovers(folder) == []
    print(version)


def traffic(folder: Path, versions: int) -> None:
    """Two writers write the same versions; what a reader has open stays, whatever the collector and the writers do."""
    done_folder = folder.with_name("done")
    SnapshotStore(folder).save(snapshot(0))

    def write() -> None:
        store = SnapshotStore(folder, keep=2)
        for version in range(1, versions + 1):
            store.save(snapshot(version))

    def until_done(step: Any) -> Any:
        def work() -> None:
            count = 0
            while not done_folder.exists() or not count:
                count += step()

        return work

    def read() -> int:
        store = SnapshotStore(folder)
        try:
            with store.load() as found:
                found.verify()
                assert found.path.is_dir()
        except NoSuchSnapshot:  # removed between the listing and the opening
            return 0
        return 1

    def collect() -> int:
        return len(SnapshotStore(folder, keep=1).collect())

    writers = [fork(write), fork(write)]
    others = [fork(until_done(read)), fork(until_done(read)), fork(until_done(collect))]
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in writers]
    SnapshotStore(folder).save(snapshot(versions + 1))  # something to collect, whoever was slow to start
    done_folder.mkdir()
    codes += [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in others]
    assert codes == [0] * 5, codes
    SnapshotStore(folder, keep=1).collect()
    assert check_versions(SnapshotStore(folder), folder) == [versions + 1]
    assert leftovers(folder) == []
    print(versions)


if __name__ == "__main__":
    torch.set_num_threads(1)  # a forked child has none of its parent's threads, and would wait for them
    if sys.argv[1] == "every":
        every(Path(sys.argv[2]))
    elif sys.argv[1] == "traffic":
        traffic(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        at_random(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
