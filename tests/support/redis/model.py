"""A pool as it should be: what every script promises, in plain Python, and what Redis has to hold after each step.

`Model` knows jobs, leases, counters and every entry that reply streams should have got. It knows each job's turn, but
not where it waits: whoever runs a script checks that against what Redis held before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from support.redis.state import FLEETING_KINDS, LASTING, LASTING_KINDS, State

CLASSES = 3
HOUR_MS = 3_600_000
ENTRY_BYTES = 64
TERMINAL = ("done", "cancelled", "expired", "dead")

Entry = tuple[str, tuple[tuple[str, str], ...]]
"""(client, fields) of an outcome on a reply stream."""


@dataclass
class Job:
    """What became of one submitted id. prefers: a worker. pieces: sample -> number of the piece -> its bytes."""

    id: str
    n: int
    cls: int
    client: str
    group: str
    min_version: int
    staleness: int | None
    deadline: bool
    payload: str
    prefers: str = ""
    state: str = "q"
    owner: str = ""
    attempt: int = 0
    lost: int = 0
    suspect: bool = False
    overdue: bool = False
    lapsed: bool = False  # the time for which it is left to the worker it prefers is over
    published: set[int] = field(default_factory=set)
    pieces: dict[int, dict[int, str]] = field(default_factory=dict)
    saved: bool = False
    turn: int = 0  # in samples of virtual time
    moves: int = 0
    moving_to: str = ""  # it was released to this worker and not claimed since
    moved_to: str = ""

    @property
    def unpublished(self) -> int:
        return self.n - len(self.published)

    @property
    def saved_bytes(self) -> int:
        return sum(len(piece) for pieces in self.pieces.values() for piece in pieces.values())

    @property
    def open(self) -> bool:
        return self.state in ("q", "r")

    def needs(self, committed: int) -> int:
        """The oldest weights it may start on."""
        return max(self.min_version, 0 if self.staleness is None else committed - self.staleness)

    def save(self, sample: int, number: int, content: str) -> str:
        """A piece goes after its forerunner, in place of all that came after that."""
        if sample in self.published:
            return "ok"
        before = self.pieces.get(sample, {})
        if number and number - 1 not in before:
            return "gap"
        self.pieces[sample] = {i: piece for i, piece in before.items() if i < number} | {number: content}
        self.saved = True
        return "ok"

    def pieces_saved(self) -> dict[str, str]:
        """The fields that say what there is of it already."""
        found = {f"s{sample}": "" for sample in self.published}
        for sample, pieces in self.pieces.items():
            found |= {f"k{sample}" + (f".{number}" if number else ""): content for number, content in pieces.items()}
        return found

    def progress(self) -> dict[str, str]:
        """What a claim says of it beside its payload."""
        past = {"c": str(self.lost) if self.lost else "", "M": str(self.moves) if self.moves else ""}
        said = {name: value for name, value in past.items() if value and self.attempt}
        return self.pieces_saved() | said | ({"P": ""} if self.prefers and not self.moves else {})

    def record(self) -> dict[str, str]:
        """Its hash, but for the times."""
        if not self.open:
            return {"st": self.state, "h": "h" + self.payload}
        found: dict[str, Any] = {"st": self.state, "p": self.payload, "n": self.n, "q": self.cls, "y": self.client}
        found |= {"z": len(self.payload), "a": self.attempt, "d": len(self.published), "h": "h" + self.payload}
        found |= {"T": self.turn}
        preference = f"{HOUR_MS}@{self.prefers}" if self.prefers else ""
        if self.moves:
            preference = f"0@{self.moved_to}"
        optional = {
            "P": preference,
            "v": self.min_version,
            "g": self.staleness,
            "G": self.group,
            "w": self.owner,
            "c": self.lost,
            "M": self.moves,
            "m": int(bool(self.moving_to)),
        }
        found |= {name: value for name, value in optional.items() if value or (name == "g" and value is not None)}
        found |= {name: content or 1 for name, content in self.pieces_saved().items()} | (
            {"kk": self.saved_bytes} if self.saved else {}
        )
        return {name: str(value) for name, value in found.items()}


class Model:
    """The truth to compare Redis with. `said` and `letters` are what the step under way must add to the streams."""

    def __init__(self, max_lost: int) -> None:
        self.max_lost = max_lost
        self.jobs: dict[str, Job] = {}
        self.workers: dict[str, bool] = {}  # registered -> its lease has run out
        self.counts: Counter[str] = Counter()
        self.unread: Counter[str] = Counter()
        self.committed, self.served = 0, set[int]()  # the newest version, and all that ever were
        self.holders: dict[str, str] = {}  # who offers the newest one, and where
        self.now = [0] * CLASSES  # the newest turn that a worker was given
        self.turns: list[dict[str, int]] = [{} for _ in range(CLASSES)]  # where each tenant's last job ends
        self.said: list[Entry] = []
        self.letters: list[tuple[str, str]] = []
        self.streams: dict[str, dict[str, dict[str, str]]] = {}
        self.dead: dict[str, dict[str, str]] = {}
        self.told: dict[str, list[str]] = {}  # job -> samples and outcomes its client ever got, in order

    def open_jobs(self) -> list[Job]:
        return [job for job in self.jobs.values() if job.open]

    def saved(self) -> int:
        return sum(job.saved_bytes for job in self.open_jobs())

    def kept(self) -> int:
        """Bytes that count against the pool's."""
        return self.counts["bytes"] + self.counts["unread"] + self.counts["letters"] + self.saved()

    def held(self, worker: str) -> list[Job]:
        return [job for job in self.jobs.values() if job.owner == worker]

    def left_to_another(self, job: Job, worker: str) -> bool:
        """Whether `worker` must leave it to the one it prefers, never claimed, in time, and with a lease; or to the one
        that it was released to."""
        if job.moving_to:
            return job.moving_to != worker and not job.lapsed
        other = job.prefers not in ("", worker) and not self.workers.get(job.prefers, True)
        return other and not job.attempt and not job.lapsed

    def gone(self, id: str) -> bool:
        """Whether the worker that this job is left to is not registered any more; then it is waited for no longer."""
        job = self.jobs[id]
        gone = (job.moving_to or job.prefers) not in self.workers
        job.lapsed = job.lapsed or gone
        return gone

    def owns(self, worker: str, job_id: str, attempt: int) -> bool:
        job = self.jobs.get(job_id)
        return job is not None and job.state == "r" and (job.owner, job.attempt) == (worker, attempt)

    # what a step does

    def accept(self, job: Job) -> None:
        self.jobs[job.id] = job
        self.counts.update(jobs=1, bytes=len(job.payload), accepted=1, offered=job.n)
        turns, tenant = self.turns[job.cls], job.client.partition("/")[0]
        job.turn = max(self.now[job.cls], turns.get(tenant, 0))
        turns[tenant] = job.turn + job.n

    def _say(self, client: str, fields: dict[str, str], nbytes: int) -> None:
        self.said.append((client, tuple(sorted(fields.items()))))
        self.unread[client] += ENTRY_BYTES + nbytes
        self.counts["unread"] += ENTRY_BYTES + nbytes

    def _end(self, job: Job, outcome: str) -> None:
        self.counts.update({"jobs": -1, "bytes": -len(job.payload), outcome: 1})
        job.state, job.owner = outcome, ""

    def fail(self, job: Job, outcome: str, cause: str, host: str = "", error: str = "") -> None:
        fields = {"j": job.id, "o": outcome, "c": cause, "h": host, "e": error}
        fields |= {"a": str(job.attempt), "d": str(len(job.published)), "G": job.group or job.id}
        self._say(job.client, fields, len(cause) + len(host) + len(error))
        if outcome == "dead":
            self.letters.append((job.id, cause))
            self.counts["letters"] += ENTRY_BYTES + len(cause) + len(host) + len(error) + len(job.payload)
        self._end(job, outcome)
        if not any(other.client == job.client for other in self.open_jobs()):
            for turns in self.turns:
                turns.pop(job.client, None)  # what nobody ran is not its turn

    def expire_queued(self, job: Job) -> None:
        self.fail(job, "expired", "its deadline passed in the queue")

    def end_overdue(self, job: Job) -> None:
        where = "in the queue" if job.state == "q" else "while it was running"
        self.fail(job, "expired", f"its deadline passed {where}")

    def claim(self, worker: str, job: Job) -> None:
        self.counts.update(attempts=1, redelivered=int(job.attempt > 0 and not job.moving_to))
        job.moving_to = ""
        job.state, job.owner, job.attempt = "r", worker, job.attempt + 1

    def publish(self, worker: str, job_id: str, attempt: int, sample: int, result: str) -> str:
        job = self.jobs.get(job_id)
        if job is not None and (
            job.state == "done" or (sample in job.published and job.open and attempt == job.attempt)
        ):
            return "again"
        if job is None or not self.owns(worker, job_id, attempt) or not 0 <= sample < job.n:
            return "fenced"
        job.published.add(sample)
        job.pieces.pop(sample, None)
        last = len(job.published) == job.n
        self._say(job.client, {"j": job_id, "s": str(sample), "m": result, "l": str(int(last))}, len(result))
        if last:
            self._end(job, "done")
        return "ok"

    def requeue(self, job: Job) -> None:
        job.state, job.owner = "q", ""

    def move(self, job: Job, to: str) -> None:
        """Released to a worker that is there."""
        self.counts["moved"] += 1
        job.moves, job.moving_to, job.moved_to, job.lapsed = job.moves + 1, to, to, False
        self.requeue(job)

    def lose(self, job: Job, text: str, worker: str) -> bool:
        """A job was in an engine or under a lease that is gone. Whether that was once too often."""
        job.lost += 1
        job.suspect = job.lost >= self.max_lost - 1
        if job.lost >= self.max_lost:
            self.fail(job, "dead", text.format(job.lost), worker)
            return True
        self.requeue(job)
        return False

    def take(self, client: str, entries: Iterable[str]) -> None:
        """A client acknowledges entries."""
        stream = self.streams.get(client, {})
        for entry in entries:
            if fields := stream.pop(entry, None):
                nbytes = ENTRY_BYTES + sum(len(fields.get(name, "")) for name in "mche")
                self.unread[client] -= nbytes
                self.counts.update(unread=-nbytes, taken=nbytes)
        if not stream:
            self.forget_unread(client)

    def forget_unread(self, client: str) -> None:
        self.counts["unread"] -= self.unread.pop(client, 0)

    # what Redis must hold

    def check(self, state: State) -> None:
        """Compare everything, and write down what streams got."""
        self._check_streams(state)
        self._check_jobs(state)
        self._check_places(state)
        self._check_indexes(state)
        self._check_keys(state)

    def _check_streams(self, state: State) -> None:
        fresh: Counter[Entry] = Counter()
        streams = state.named("reply")
        for client, stream in streams.items():
            known = self.streams.setdefault(client, {})
            for entry, fields in stream.items():
                if entry not in known:
                    known[entry] = fields
                    fresh[client, tuple(sorted(fields.items()))] += 1
                    self._hear(client, fields)
        assert fresh == Counter(self.said), "what clients are told"
        assert {c: s for c, s in streams.items() if s} == {c: s for c, s in self.streams.items() if s}, "reply streams"
        letters = {entry: fields for entry, fields in state["dead"].items() if entry not in self.dead}
        assert sorted((found["id"], found["cause"]) for found in letters.values()) == sorted(self.letters)
        assert all(found["payload"] == self.jobs[found["id"]].payload for found in letters.values())
        self.dead |= letters
        assert state["dead"].keys() == self.dead.keys() == {name.split()[0] for name in state["letters"]}
        assert self.counts["letters"] == sum(int(name.split()[1]) for name in state["letters"])
        self.said, self.letters = [], []

    def _hear(self, client: str, fields: dict[str, str]) -> None:
        """One terminal outcome a job, every sample once, nothing after the end: from the streams alone."""
        job = self.jobs[fields["j"]]
        told = self.told.setdefault(job.id, [])
        assert client == job.client
        assert not told or told[-1] not in (*TERMINAL, "last"), f"{fields} after {told}"
        assert fields.get("s", fields.get("o")) not in told, f"{fields} twice"
        told.append(fields.get("s", fields.get("o", "")))
        if fields.get("l") == "1":
            assert sorted(map(int, told)) == list(range(job.n)), f"done with {told} of {job.n}"
            told.append("last")

    def _check_jobs(self, state: State) -> None:
        records = state.named("job")
        assert records.keys() == self.jobs.keys(), "job records"
        for id, record in records.items():
            job, times = self.jobs[id], {name: record.get(name) for name in "te"}
            assert {name: value for name, value in record.items() if name not in times} == job.record(), id
            saved = [name[1:].split(".") for name in record if name[0] == "k" and name != "kk"]
            for sample in {parts[0] for parts in saved}:
                numbers = sorted(int(parts[1]) if parts[1:] else 0 for parts in saved if parts[0] == sample)
                assert numbers == list(range(len(numbers))), f"{id}: pieces {numbers} of sample {sample}"
            assert (times["t"] is not None) == job.open
            assert (times["e"] is not None) == (job.open and job.deadline)
            assert (state["deadlines"].get(id) is not None) == (times["e"] is not None), f"{id} in deadlines"
            assert times["e"] is None or state["deadlines"][id] == float(times["e"])
            assert (state.ttl[f"job:{id}"] > 0) == (not job.open), f"{id}: a TTL only when it has ended"
            told = self.told.get(id, [])
            assert (job.state == "done") == ("last" in told)
            assert [word for word in told if word in TERMINAL] == ([job.state] if job.state in TERMINAL[1:] else [])
        assert all(id in self.jobs for id in state["deadlines"])

    def _check_places(self, state: State) -> None:
        places: dict[str, list[str]] = {}
        for cls in range(CLASSES):
            for id in state.queue(cls):
                places.setdefault(id, []).append(f"queued:{cls}")
                assert state[f"queued:{cls}"][id] == self.jobs[id].turn, f"{id} has lost its turn"
            for id in state.later(cls):
                places.setdefault(id, []).append(f"later:{cls}")
                assert f"{self.jobs[id].turn:015d}:{id}" in state[f"later:{cls}"], f"{id} has lost its turn"
        for id in state["suspects"]:
            places.setdefault(id, []).append("suspects")
        for job in self.jobs.values():
            found = places.pop(job.id, [])
            job.lapsed = job.lapsed or (bool(job.moving_to) and state.later(job.cls).get(job.id, 0) >= 0)
            if job.state == "q":
                own = ["suspects"] if job.suspect else [f"queued:{job.cls}", f"later:{job.cls}"]
                assert len(found) == 1, f"{job.id} is queued and in {found}"
                assert found[0] in own, f"{job.id} is queued and in {found}"
            elif job.state == "r":
                assert found == [], f"{job.id} runs and is in {found}"
            else:  # an ended job's id may wait among the suspects until a worker comes across it
                assert found in ([], ["suspects"]), f"{job.id} has ended and is in {found}"
        assert places == {}, "ids that nobody submitted"
        held = {worker: {job.id for job in self.held(worker)} for worker in self.workers}
        assert state.named("held") == {worker: ids for worker, ids in held.items() if ids}
        for worker, record in state.named("worker").items():
            ids = held[worker]
            assert record.get("alone") not in ids or len(ids) == 1, f"{worker} runs a suspect among {ids}"

    def _check_indexes(self, state: State) -> None:
        others = ("owed", "numbers", "cap", "hour", "roster", "turn", "spread", "planned")
        counters = {name: int(n) for name, n in state["load"].items() if not name.startswith(others)}
        queued = sum(self.jobs[id].unpublished for cls in range(CLASSES) for id in state.queue(cls))
        assert {k: v for k, v in counters.items() if v} == {
            k: v for k, v in {**self.counts, "saved": self.saved(), "queued": queued}.items() if v
        }, "counters"
        for cls, turns in enumerate(self.turns):
            assert int(state["load"].get(f"turn{cls}", 0)) == self.now[cls], "the turn that was given last"
            found = state[f"turns:{cls}"]
            assert found.items() <= turns.items(), "tenants' turns"
            idle = not state.queue(cls) and not state.later(cls)
            for tenant, at in list(turns.items()):
                if tenant not in found:
                    assert idle or at <= self.now[cls], "a turn was forgotten"
                    del turns[tenant]
        owed = {name: int(value) for name, value in state["load"].items() if name.startswith("owed")}
        assert owed.keys() <= {"owed1", "owed2"}
        assert all(value >= 0 for value in owed.values())
        left = {id: score for cls in range(CLASSES) for id, score in state.later(cls).items() if score < 0}
        assert state["prefers"].keys() == left.keys(), "jobs that are left to the worker they prefer"
        for job in (self.jobs[id] for id in left):
            assert job.state == "q"
            assert job.attempt == 0 or job.moving_to
            its = state[f"worker:{job.moving_to or job.prefers}"]
            assert -left[job.id] == float(its.get("number", -left[job.id]))
        clients: dict[str, set[str]] = {}
        for job in self.open_jobs():
            clients.setdefault(job.client, set()).add(job.id)
        assert state.named("client") == clients, "clients' open jobs"
        assert {k: int(v) for k, v in state["unread"].items()} == {k: v for k, v in self.unread.items() if v}, "unread"
        assert state["takers"].keys() <= self.workers.keys(), "who shares what waits"
        assert state["workers"].keys() == self.workers.keys() == state.named("worker").keys(), "leases"
        assert int(state["weights"].get("committed", 0)) == self.committed
        here = {who: where for who, where in self.holders.items() if not who or who in self.workers}
        assert state["holders"] == here, "who offers the newest weights"

    def _check_keys(self, state: State) -> None:
        for key, ttl in state.ttl.items():
            kind = key.partition(":")[0]
            if kind in FLEETING_KINDS or key in ("wake", "ward"):
                assert ttl != -1, f"{key} would stay for ever"
            elif kind != "job":
                assert key in LASTING or (kind in LASTING_KINDS and ":" in key), f"{key} is of no known kind"
                assert ttl == -1, f"{key} would vanish"
