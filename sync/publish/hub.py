"""The trainer's end of the lines: it offers versions, and tells each receiver that joins from whom to take one."""

from __future__ import annotations

import contextlib
import json
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

from ...messages.errors import MalformedMessage
from ..tensors import Snapshot
from ..wire import ANSWER, REFUSE, WAIT, Brief, Map, Offer, RelayTree, Shelf, Talk, export_handles, gpu_id, layout_of
from .cells import Cells, Gathering

SILENT_S = 0.6
"""Seconds without an answer after which a process that has joined counts as stopped."""
AWAKE_S = 0.4
"""Between two looks at a silent process no more is counted: a host that is too busy to look is too busy to answer."""
RANKS = 4096
"""Most processes of one engine."""
REMEMBER_S = 120.0
"""Seconds for which it is remembered that a worker was lost."""
REMEMBERED = 32
"""Versions of which it is remembered why they are offered no more."""


@dataclass(slots=True)
class Line:
    """The connection of one process of an engine. asked: whether an answer is awaited. gone: why it is lost, or "".

    silent_s: for how long, as far as this process was awake to hear it. looked: when that was noted.
    """

    worker: str
    talk: Talk
    asked: bool = False
    silent_s: float = 0.0
    looked: float = 0.0
    gone: str = ""


@dataclass(slots=True)
class Outgoing:
    """One version on its way, of the weights or of a LoRA adapter.

    ranks: those that take it, "worker/rank" -> the line of that process. done: those that have all bytes, verified.
    by_ipc: those that got handles of its buckets. Who comes again without it takes it bucket by bucket.
    committed: whether a worker serves it.
    """

    snapshot: Snapshot
    token: str
    offer: Offer
    brief: bytes
    adapter: bool
    sources: RelayTree = field(default_factory=RelayTree)
    ranks: dict[str, Line] = field(default_factory=dict)
    done: set[str] = field(default_factory=set)
    gathering: Gathering = field(default_factory=lambda: Gathering(frozenset()))
    by_ipc: set[str] = field(default_factory=set)
    handles: bytes = b""
    committed: bool = False

    @property
    def joined(self) -> set[str]:
        """The workers that take part or took part."""
        return {name.rpartition("/")[0] for name in list(self.ranks)}

    @property
    def receiving(self) -> set[str]:
        """The workers that still need this version's bytes."""
        ranks = list(self.ranks.items())
        return {name.rpartition("/")[0] for name, line in ranks if not (name in self.done or line.gone)}


class Hub:
    """Versions on offer, and everybody who takes them. Any thread may call its methods.

    news(): called from any thread when a receiver came, has everything, or is lost.
    """

    def __init__(
        self,
        host: str,
        port: int,
        news: Callable[[], None],
        *,
        gpu_direct: bool,
        timeout_s: float,
        cpu_cells: bool = False,
    ) -> None:
        """host, port: where it listens. gpu_direct: whether a version may go from GPU to GPU. cpu_cells: see Cells.

        timeout_s: most seconds of a broadcast. Raises WeightSyncError if it cannot listen.
        """
        self._news, self._gpu_direct, self._timeout_s = news, gpu_direct, timeout_s
        self._lock = threading.RLock()
        self._outgoing: dict[str, Outgoing] = {}
        self._lines: dict[Talk, Line] = {}
        self._withdrawn: dict[str, str] = {}  # token -> why, of the last ones
        self._gone: dict[str, tuple[str, float]] = {}
        self._cells = Cells(host, self.lost, self.probe, cpu=cpu_cells)
        self._shelf = Shelf(host, port, self._serve)
        self.address = self._shelf.address

    def close(self) -> None:
        """Offer nothing more."""
        for outgoing in list(self._outgoing.values()):
            self.withdraw(outgoing, "the sender leaves")
        self._shelf.close()
        self._cells.close()
        for line in list(self._lines.values()):
            line.talk.close()

    def offer(self, snapshot: Snapshot, expected: AbstractSet[str], config: dict[str, Any] | None = None) -> Outgoing:
        """Offer a version until `withdraw`. expected: the workers that are alive. config: of a LoRA adapter."""
        token, buckets = secrets.token_hex(16), snapshot.buckets
        said = json.dumps(config) if config is not None else ""
        offer = Offer(token, lambda: snapshot.manifest, len(buckets), buckets.__getitem__, said)
        outgoing = Outgoing(snapshot, token, offer, Brief.of(snapshot.manifest).to_bytes(), config is not None)
        outgoing.gathering = self._cells.expect(expected)
        offer.arrived()
        with self._lock:
            self._outgoing[token] = outgoing
            old = time.monotonic() - REMEMBER_S
            self._gone = {worker: (why, at) for worker, (why, at) in self._gone.items() if at > old}
        self._shelf.put(offer)
        return outgoing

    def withdraw(self, outgoing: Outgoing, why: str) -> None:
        """Offer it no more. Who still takes it hears why."""
        with self._lock:
            if self._outgoing.pop(outgoing.token, None) is not None:
                self._withdrawn[outgoing.token] = why
                if len(self._withdrawn) > REMEMBERED:
                    del self._withdrawn[next(iter(self._withdrawn))]
        self._shelf.take(outgoing.offer, why)

    def lost(self, worker: str) -> tuple[str, float]:
        """Return why a worker is lost and since when (time.monotonic()); "" if it is not, or never joined."""
        with self._lock:
            return self._gone.get(worker, ("", 0.0))

    def probe(self, workers: Iterable[str]) -> None:
        """Ask these whether they are alive. Who has not answered the last `probe` within SILENT_S is lost."""
        now, these = time.monotonic(), set(workers)
        with self._lock:
            lines = [line for line in self._lines.values() if line.worker in these]
        for line in lines:
            since, line.looked = line.looked, now
            if not line.asked:
                line.asked, line.silent_s = True, 0.0
                with contextlib.suppress(OSError):  # its own thread sees that it is gone
                    line.talk.say(WAIT)
            elif (silent_s := line.silent_s + min(now - since, AWAKE_S)) <= SILENT_S:
                line.silent_s = silent_s
            else:
                self._lose(line, "is stopped: it does not answer")
                line.talk.close()

    # --- the receivers' questions, each in its connection's thread ---------------------------------------------------

    def _serve(self, told: Map, talk: Talk) -> bool:
        line = self._lines.get(talk)
        if line is not None:
            line.asked = False
        if "do" not in told:
            if line is not None and "gone" in told:
                self._lose(line, "was lost: its connection is closed")
            return True
        if told["do"] not in ("join", "source", "done"):
            return False
        with self._lock:
            outgoing = self._outgoing.get(token := str(told.get("token")))
            why = self._withdrawn.get(token, "the sender does not know this version")
        if outgoing is None:
            if told["do"] != "done":
                talk.say(REFUSE, why)
            return True
        try:
            join = told["do"] == "join"
            answer = self._join(outgoing, told, talk) if join else self._go_on(outgoing, told)
        except (MalformedMessage, KeyError) as error:
            talk.say(REFUSE, f"{error}")
            return True
        if answer is not None:
            talk.say(ANSWER, answer)
        self._news()
        return True

    def _join(self, outgoing: Outgoing, told: Map, talk: Talk) -> Map:
        worker, number, gpu = _who(told)
        snapshot, direct = outgoing.snapshot, self._gpu_direct and not outgoing.adapter
        with self._lock:
            line = self._lines.setdefault(talk, Line(worker, talk))
            line.worker = worker
            self._gone.pop(worker, None)
            name = f"{worker}/{number}"
            failed = name in outgoing.by_ipc - outgoing.done  # it comes again, without having had it
            outgoing.ranks[name] = line
            outgoing.done.discard(name)
            outgoing.sources.join(name, str(told.get("address", ""))[:300])
            answer: Map = {"who": name, "brief": outgoing.brief}
            here = gpu_id(snapshot.device) if direct else ""
            if here and gpu == here and not failed:
                outgoing.by_ipc.add(name)
                outgoing.handles = outgoing.handles or export_handles(snapshot.buckets)
                return answer | {"way": "ipc", "handles": outgoing.handles}
        if direct and self._cells.suits(snapshot, told):
            ready = told.get("ready") == layout_of(outgoing.brief)
            place = self._cells.place(outgoing.gathering, told, snapshot, self._timeout_s, ready=ready)
            if place is not None:
                return answer | place
        with self._lock:
            return answer | {"way": "pull", "source": outgoing.sources.source(name)}

    def _go_on(self, outgoing: Outgoing, told: Map) -> Map | None:
        who = str(told.get("who"))[:300]
        with self._lock:
            if told["do"] == "done":
                if who in outgoing.ranks:
                    outgoing.done.add(who)
                    outgoing.sources.done(who)
                return None
            avoid = told.get("avoid", [])
            if not isinstance(avoid, list):
                raise MalformedMessage(f"avoid {str(avoid)[:80]!r}: a list of addresses")
            return {"source": outgoing.sources.source(who, frozenset(avoid[:64]))}

    def _lose(self, line: Line, why: str) -> None:
        with self._lock:
            if self._lines.get(line.talk) is not line:
                return
            del self._lines[line.talk]
            line.gone = why
            if not any(other.worker == line.worker for other in self._lines.values()):
                self._gone[line.worker] = why, time.monotonic()
            for outgoing in self._outgoing.values():
                for name, its in outgoing.ranks.items():
                    if its is line:
                        outgoing.sources.gone(name)
        self._news()


def _who(told: Map) -> tuple[str, int, str]:
    """Return worker, rank and GPU of who joins. Raises MalformedMessage."""
    worker, rank, ranks, gpu = (told.get(name) for name in ("worker", "rank", "ranks", "gpu"))
    if not (isinstance(worker, str) and isinstance(gpu, str) and len(worker) <= 256 and len(gpu) <= 128):
        raise MalformedMessage(f"worker {str(worker)[:80]!r}, gpu {str(gpu)[:80]!r}: texts of at most 256 characters")
    if type(rank) is not int or type(ranks) is not int or not 0 <= rank < ranks <= RANKS:
        raise MalformedMessage(f"rank {str(rank)[:80]} of {str(ranks)[:80]}: a number below that of all ranks")
    return worker, rank, gpu
