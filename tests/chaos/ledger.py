"""What happened to every job, told by the writes of the server: accepted, claimed, given back, published, ended."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

Kind = Literal["accept", "claim", "requeue", "lost", "publish", "failure", "terminal", "letter", "ack", "open", "clock"]
ENDED = frozenset({"done", "cancelled", "expired", "dead"})


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened, as the log has it.

    worker, attempt, state: what the job's record said at that moment (for a claim: from then on); `was` is the state
    just before. entry: id of a stream entry. at_ms: no later than this by Redis' clock (0: unknown). outcome: of a
    failure, an end or a dead letter; payload: of an accepted job or a published result. shard: whose log it is in.
    """

    seq: int
    kind: Kind
    job: str = ""
    worker: str = ""
    attempt: int = 0
    state: str = ""
    was: str = ""
    n: int = 0
    sample: int = -1
    client: str = ""
    entry: str = ""
    outcome: str = ""
    cause: str = ""
    host: str = ""
    payload: bytes = b""
    at_ms: int = 0
    shard: int = 0


def tell(commands: Iterable[list[bytes]], prefix: str, lease_ms: int = 0) -> list[Event]:
    """The events of the pool whose keys begin with `prefix`, each with the time of the next write that has one.

    lease_ms: of its workers, if they all have the same; then every heartbeat tells the time.
    """
    teller = _Teller(prefix, lease_ms)
    for command in commands:
        teller.hear(command)
    events, later = [], 0
    for event in reversed(teller.events):
        later = event.at_ms or later
        events.append(replace(event, at_ms=later))
    return events[::-1]


class _Teller:
    def __init__(self, prefix: str, lease_ms: int) -> None:
        self.prefix, self.lease_ms = prefix.encode(), lease_ms
        self.events: list[Event] = []
        self.records: dict[str, dict[bytes, bytes]] = {}

    def hear(self, command: list[bytes]) -> None:
        name = command[0].upper()
        if len(command) < 2 or not command[1].startswith(self.prefix):
            return
        key = _text(command[1][len(self.prefix) :])
        family, _, rest = key.partition(":")
        if family == "job":
            self._record(name, rest, command[2:])
        elif name == b"XADD":
            self._entry(family, rest, command[2:])
        elif name == b"HSET" and family == "clock":
            self.lease_ms = 0  # leases end by the pool's clock; here is what Redis' own clock says
            self._say("clock", at_ms=_number(dict(zip(command[2::2], command[3::2], strict=True)).get(b"seen", b"")))
        elif name == b"ZADD" and family == "workers" and self.lease_ms:
            self._say("clock", at_ms=int(float(command[2])) - self.lease_ms)
        elif name == b"XDEL" and family == "reply":
            for entry in command[2:]:
                self._say("ack", client=rest, entry=entry.decode())

    def _say(self, kind: Kind, job: str = "", **fields: object) -> None:
        record = self.records.get(job, {})
        said: dict[str, object] = {
            "worker": _text(record.get(b"w", b"")),
            "attempt": _number(record.get(b"a", b"")),
            "state": _text(record.get(b"st", b"")),
            "client": _text(record.get(b"y", b"")),
            "n": _number(record.get(b"n", b"")),
        }
        self.events.append(Event(len(self.events), kind, job, **(said | fields)))  # type: ignore[arg-type]

    def _record(self, name: bytes, job: str, args: list[bytes]) -> None:
        record = self.records.setdefault(job, {})
        was = _text(record.get(b"st", b""))
        if name in {b"DEL", b"UNLINK"}:
            self.records[job] = {b"_was": record.get(b"st", b""), b"_w": record.get(b"w", b"")} | {
                name: record[name] for name in (b"y", b"n", b"a") if name in record
            }
        elif name == b"HDEL":
            for field in args:
                record.pop(field, None)
        elif name == b"HINCRBY" and args[0] == b"c":
            self._say("lost", job, was=was)
        elif name == b"HSET":
            changed = dict(zip(args[::2], args[1::2], strict=True))
            record.update(changed)
            self._changed(job, changed, was or _text(record.pop(b"_was", b"")))

    def _changed(self, job: str, changed: dict[bytes, bytes], was: str) -> None:
        state = _text(changed.get(b"st", b""))
        if b"p" in changed and b"t" in changed:
            self._say("accept", job, was=was, payload=changed[b"p"], at_ms=_number(changed.get(b"t", b"")))
        elif state == "r":
            self._say("claim", job, was=was)
        elif state == "q":
            self._say("requeue", job, was=was)
        elif state in ENDED:
            self._say("terminal", job, was=was, outcome=state, worker=_text(self.records[job].get(b"_w", b"")))

    def _entry(self, family: str, rest: str, args: list[bytes]) -> None:
        at = next(i for i, word in enumerate(args) if _is_entry_id(word))
        entry, fields = args[at].decode(), dict(zip(args[at + 1 :: 2], args[at + 2 :: 2], strict=True))
        at_ms = int(entry.split("-")[0])
        job = _text(fields.get(b"j", b""))
        if family == "reply" and b"m" in fields:
            sample = _number(fields.get(b"s", b""), -1)
            self._say("publish", job, client=rest, entry=entry, sample=sample, payload=fields[b"m"], at_ms=at_ms)
        elif family == "reply":
            outcome, cause = (_text(fields.get(name, b"")) for name in (b"o", b"c"))
            self._say("failure", job, client=rest, entry=entry, outcome=outcome, cause=cause, at_ms=at_ms)
        elif family == "reader":
            self._say("open", client=rest, entry=entry, at_ms=at_ms)
        elif family == "dead":
            cause, host = _text(fields[b"cause"]), _text(fields[b"host"])
            self._say("letter", _text(fields[b"id"]), entry=entry, cause=cause, host=host, at_ms=at_ms)
        else:
            self._say("clock", at_ms=at_ms)


def _text(value: bytes) -> str:
    """Scenarios write garbage, too."""
    return value.decode(errors="replace")


def _number(value: bytes, otherwise: int = 0) -> int:
    return int(value) if value.isdigit() else otherwise


def _is_entry_id(word: bytes) -> bool:
    left, dash, right = word.partition(b"-")
    return bool(dash) and left.isdigit() and right.isdigit()


def write(events: Iterable[Event], path: Path) -> None:
    """One line of JSON per event, for people; payloads as their length."""
    with path.open("w") as file:
        for event in events:
            file.write(json.dumps(asdict(event) | {"payload": len(event.payload)}) + "\n")
