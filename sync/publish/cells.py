"""Cells: engines on GPUs of their own that get a version from the trainer by broadcast, and stay together.

A cell lasts as long as its members come. One that lacks a member is not waited for: who came is put into a new one.
When a broadcast breaks off, its members come again and take what they lack from whoever has it; at the next version
they are in a new cell. An engine's ranks are in one cell. Who comes late gets one of its own. Who finds no place takes
the version bucket by bucket.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from ...messages.errors import WeightSyncError
from ..tensors import Snapshot
from ..wire import Map, begin, gpu_id, nccl_settings, serve_store
from .cell import Cell

log = logging.getLogger(__name__)
GATHER_S = 0.25
"""Most seconds that the first one that comes waits for the others."""
RANKS = 8
"""Most receiving ranks of a cell."""
MOST = 3
"""Most cells. Each costs the trainer a copy; everybody else takes the version from their members."""
AT_ONCE_S = 0.25
"""Seconds after which a store that has not answered is ill: bytes of strangers can keep torch's server busy."""
WATCH_S = 0.1
CLOSE_S = 5.0
KEPT = 32
"""Broadcasts whose keys stay in the store: members that load late look there whether all were ready."""


@dataclass(frozen=True, slots=True)
class Comer:
    """An engine that comes for a version. ranks: those of its processes that have come, of `count`.

    unready: those of them that have no buffers for it yet.
    """

    count: int
    gpu: str
    group: str
    ranks: set[int] = field(default_factory=set)
    unready: set[int] = field(default_factory=set)


@dataclass(slots=True)
class Gathering:
    """Who has come for one version. places: worker -> its place, once that is decided.

    late: worker that came after that -> a gathering of its own. store_answers: done as soon as the store where cells
    meet has answered.
    """

    expected: AbstractSet[str]
    late: dict[str, Gathering] = field(default_factory=dict)
    came: dict[str, Comer] = field(default_factory=dict)
    since: float = 0.0
    places: dict[str, Map] | None = None
    store_answers: Future[bool] | None = None


class Cells:
    """All cells of a trainer. Threads that serve receivers call `place`; it waits.

    lost(worker), probe(workers): see Hub.
    """

    def __init__(
        self, host: str, lost: Callable[[str], tuple[str, float]], probe: Callable[[Iterable[str]], None], *, cpu: bool
    ) -> None:
        """cpu: whether engines on a CPU are put into cells too, with gloo. It is for tests."""
        self._host, self._lost, self._probe, self._cpu = host, lost, probe, cpu
        self._store: Any = None
        self._cells: list[Cell] = []
        self._past: deque[tuple[Cell, str]] = deque()
        self._changed = threading.Condition()
        self._numbers, self._probed = 0, 0.0
        self._threads: set[threading.Thread] = set()
        self._said = ""

    def close(self) -> None:
        """Leave every cell."""
        with self._changed:
            cells, self._cells = self._cells, []
        for cell in cells:
            cell.give_up("the sender leaves")
            cell.turns.put(None)
        for thread in list(self._threads):  # a process that ends in the midst of NCCL's end is aborted
            thread.join(CLOSE_S)

    def suits(self, snapshot: Snapshot, told: Map) -> bool:
        """Whether who joins may be in a cell. told: what it said when it joined."""
        if not told.get("cuda"):
            return self._cpu and snapshot.device.type == "cpu"
        bucket = snapshot.buckets[0] if snapshot.buckets else None
        if bucket is None or not (bucket.is_cuda or bucket.is_pinned()) or told.get("gpu") == gpu_id(bucket.device):
            return False
        if (theirs := str(told.get("nccl"))) == nccl_settings():
            return True
        if self._said != theirs:
            self._said = theirs
            log.warning("no broadcast: NCCL is set %r here, %r on a worker", nccl_settings(), theirs)
        return False

    def expect(self, workers: AbstractSet[str]) -> Gathering:
        """Return who comes for a version that is about to be announced: nobody so far."""
        gathering, store = Gathering(workers), self._store
        if store is not None:  # asked now, because those who have come would wait for the answer
            gathering.store_answers = begin(partial(store.check, ["none"]))
        return gathering

    def place(
        self, gathering: Gathering, told: Map, snapshot: Snapshot, timeout_s: float, *, ready: bool
    ) -> Map | None:
        """Return the rank's place in a cell, whose broadcast has begun; None if it is in none. Waits for GATHER_S.

        told: what it said when it joined. ready: whether it has buffers for this version, from the last one.
        """
        worker, rank, count = str(told["worker"]), int(told["rank"]), int(told["ranks"])
        with self._changed:
            late = gathering.places is not None and worker not in gathering.came
            if late:
                gathering = gathering.late.setdefault(worker, Gathering(frozenset({worker})))
            comer = gathering.came.get(worker)
            if gathering.places is not None or (comer is not None and rank in comer.ranks):
                self._came_again(worker, str(told.get("group", "")))
                return None
            gathering.since = gathering.since or time.monotonic()
            if comer is None:
                comer = Comer(count, str(told.get("gpu", "")), str(told.get("group", "")))
                gathering.came[worker] = comer
            comer.ranks.add(rank)
            if not ready:
                comer.unready.add(rank)
            self._changed.notify_all()
            found = self._places(gathering, snapshot, timeout_s, late=late).get(worker)
            return found and found | {"rank": found["rank"] + rank}

    def _came_again(self, worker: str, group: str) -> None:
        """End the broadcasts in a group that a member has left. NCCL alone would wait for it."""
        for cell in self._cells:
            if worker in cell.members and cell.group != group:
                cell.give_up(f"{worker} has left the cell")

    def _places(self, gathering: Gathering, snapshot: Snapshot, timeout_s: float, *, late: bool) -> dict[str, Map]:
        while gathering.places is None:
            left_s = gathering.since + GATHER_S - time.monotonic()
            if left_s <= 0 or self._all_came(gathering):
                self._decide(gathering, snapshot, timeout_s, late=late)
                self._changed.notify_all()
            else:
                self._changed.wait(min(left_s, WATCH_S))
        return gathering.places

    def _all_came(self, gathering: Gathering) -> bool:
        missing = gathering.expected - gathering.came.keys()
        if any(not self._lost(worker)[0] for worker in missing):
            return False
        return all(len(comer.ranks) == comer.count for comer in gathering.came.values())

    def _decide(self, gathering: Gathering, snapshot: Snapshot, timeout_s: float, *, late: bool) -> None:
        """Say who is in which cell, and begin to send. late: for one that came alone; the others stay as they are."""
        if gathering.store_answers is not None and not _by_then(gathering.store_answers, gathering.since + AT_ONCE_S):
            log.warning("the store where cells meet does not answer: a new one is made, on another port")
            for cell in list(self._cells):
                self._drop(cell)
            self._store = None
            self._past.clear()
        whole = {worker: comer for worker, comer in gathering.came.items() if len(comer.ranks) == comer.count}
        gathering.places = {}
        going = [] if late else [cell for cell in self._cells if self._stands(cell, whole)]
        placed = {worker for cell in going for worker in cell.members}
        left = {worker: comer for worker, comer in sorted(whole.items()) if worker not in placed}
        if not late:
            if left and len(going) >= MOST:  # many small ones, of workers that came late
                going, left = [], dict(sorted(whole.items()))
            for cell in [cell for cell in self._cells if cell not in going]:
                self._drop(cell)
        while left and len(self._cells) < MOST and (made := self._make(left, snapshot)) is not None:
            self._cells.append(made)
            going.append(made)
            for worker in made.members:
                del left[worker]
        self._probed = time.monotonic()  # they have just spoken, and have more urgent things to do than to answer
        for cell in going:
            self._numbers += 1
            number = str(self._numbers)
            # Who is in the group, with buffers, need not say so once more.
            go = all(whole[it].group == cell.group and not whole[it].unready for it in cell.members)
            place: Map = {
                "way": "cell", "group": cell.group, "number": number, "world": cell.world, "port": self._store.port,
                "go": go,
            }  # fmt: skip
            gathering.places |= {worker: place | {"rank": first} for worker, first in cell.members.items()}
            cell.turns.put((snapshot, number, time.monotonic() + timeout_s, go))

    @staticmethod
    def _stands(cell: Cell, came: Mapping[str, Comer]) -> bool:
        return all(worker in came and came[worker].group == cell.group for worker in cell.members)

    def _make(self, left: Mapping[str, Comer], snapshot: Snapshot) -> Cell | None:
        members: dict[str, int] = {}
        gpus: set[str] = set()
        world = 1
        for worker, comer in left.items():
            if world - 1 + comer.count <= RANKS and (not comer.gpu or comer.gpu not in gpus):
                members[worker] = world
                world += comer.count
                gpus.add(comer.gpu)
        if not members:
            return None
        try:
            self._store = self._store or serve_store(self._host)
        except WeightSyncError as error:
            log.warning("no broadcast: %s", error)
            return None
        device = torch.device("cpu")
        if not self._cpu:
            here = snapshot.device
            device = here if here.type == "cuda" else torch.device("cuda", torch.cuda.current_device())
        cell = Cell(self._store, self._host, members, world, device, lost=partial(self._who_is_lost, members))
        # One thread for all its broadcasts: members would wait while one is started.
        thread = threading.Thread(target=self._serve, args=(cell,), name=f"rolloutmq-{cell.group}", daemon=True)
        self._threads.add(thread)
        thread.start()
        return cell

    def _serve(self, cell: Cell) -> None:
        while (turn := cell.turns.get()) is not None:
            self._send(cell, *turn)
            del turn
        cell.close()
        self._threads.discard(threading.current_thread())

    def _send(self, cell: Cell, snapshot: Snapshot, number: str, deadline: float, go: bool) -> None:
        try:
            cell.send(snapshot, number, deadline, ready=go)
        except Exception as error:  # whatever torch raises: the members hear of it, and take the version otherwise
            log.info("the cell of %s is given up: %s", ", ".join(cell.members), error)
            with self._changed:
                self._drop(cell)
        finally:
            with self._changed:
                if cell.store is self._store:
                    self._past.append((cell, number))
                old = self._past.popleft() if len(self._past) > KEPT else None
            if old is not None:  # in a thread of its own, because a store may not answer
                begin(partial(old[0].clean, old[1]))

    def _who_is_lost(self, members: Mapping[str, int]) -> str:
        """Say who of a cell is lost; "" if nobody is. It is called often while a broadcast waits."""
        now = time.monotonic()
        if now - self._probed > WATCH_S:
            self._probed = now
            self._probe([*members, *(worker for cell in list(self._cells) for worker in cell.members)])
        gone = [worker for worker in members if self._lost(worker)[0]]
        return f"{', '.join(gone)} is lost" if gone else ""

    def _drop(self, cell: Cell) -> None:
        """Let it stand no more. What it is sending comes to its end: a slow member finishes what it began."""
        if cell in self._cells:
            self._cells.remove(cell)
            cell.turns.put(None)


def _by_then(answer: Future[bool], at: float) -> bool:
    """Whether there is an answer by `at`, on time.monotonic()."""
    try:
        answer.result(max(0.0, at - time.monotonic()))
    except (RuntimeError, TimeoutError):
        return False
    return True
