"""What happened to every job, told by the writes of the server: accepted, claimed, given back, published, ended."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

Kind = Literal["accept", "claim", "requeue", "lost", "publish", "failure", "terminal", "letter", "ack", "clock"]
ENDED = frozenset({"done", "cancelled", "expired", "dead"})


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened, as the log has it.

    worker, attempt, state: what the job's record said at that moment (for a claim: from then on); `was` is the state
    just before. entry: id of a stream entry. at_ms: no later than this by Redis' clock (0: unknown). outcome: of a
    failure, an end or a dead letter; payload: of an accepted job or a published result.
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
        key = command[1][len(self.prefix) :].decode()
        family, _, rest = key.partition(":")
        if family == "job":
            self._record(name, rest, command[2:])
        elif name == b"XADD":
            self._entry(family, rest, command[2:])
        elif name == b"ZADD" and family == "workers" and self.lease_ms:
            self._say("clock", at_ms=int(float(command[2])) - self.lease_ms)
        elif name == b"XDEL" and family == "reply":
            for entry in command[2:]:
                self._say("ack", client=rest, entry=entry.decode())

    def _say(self, kind: Kind, job: str = "", **fields: object) -> None:
        record = self.records.get(job, {})
        said: dict[str, object] = {
            "worker": record.get(b"w", b"").decode(),
            "attempt": int(record.get(b"a", b"0")),
            "state": record.get(b"st", b"").decode(),
            "client": record.get(b"y", b"").decode(),
            "n": int(record.get(b"n", b"0")),
        }
        self.events.append(Event(len(self.events), kind, job, **(said | fields)))  # type: ignore[arg-type]

    def _record(self, name: bytes, job: str, args: list[bytes]) -> None:
        record = self.records.setdefault(job, {})
        was = record.get(b"st", b"").decode()
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
            self._changed(job, changed, was or record.pop(b"_was", b"").decode())

    def _changed(self, job: str, changed: dict[bytes, bytes], was: str) -> None:
        state = changed.get(b"st", b"").decode()
        if b"p" in changed and b"t" in changed:
            self._say("accept", job, was=was, payload=changed[b"p"], at_ms=int(changed.get(b"t", b"0")))
        elif state == "r":
            self._say("claim", job, was=was)
        elif state == "q":
            self._say("requeue", job, was=was)
        elif state in ENDED:
            self._say("terminal", job, was=was, outcome=state, worker=self.records[job].get(b"_w", b"").decode())

    def _entry(self, family: str, rest: str, args: list[bytes]) -> None:
        at = next(i for i, word in enumerate(args) if _is_entry_id(word))
        entry, fields = args[at].decode(), dict(zip(args[at + 1 :: 2], args[at + 2 :: 2], strict=True))
        at_ms = int(entry.split("-")[0])
        job = fields.get(b"j", b"").decode(errors="replace")
        if family == "reply" and b"m" in fields:
            number = fields.get(b"s", b"")
            sample = int(number) if number.isdigit() else -1  # a scenario writes garbage, too
            self._say("publish", job, client=rest, entry=entry, sample=sample, payload=fields[b"m"], at_ms=at_ms)
        elif family == "reply":
            outcome, cause = (fields.get(name, b"").decode(errors="replace") for name in (b"o", b"c"))
            self._say("failure", job, client=rest, entry=entry, outcome=outcome, cause=cause, at_ms=at_ms)
        elif family == "dead":
            cause, host = fields[b"cause"].decode(), fields[b"host"].decode()
            self._say("letter", fields[b"id"].decode(), entry=entry, cause=cause, host=host, at_ms=at_ms)
        else:
            self._say("clock", at_ms=at_ms)


def _is_entry_id(word: bytes) -> bool:
    left, dash, right = word.partition(b"-")
    return bool(dash) and left.isdigit() and right.isdigit()


def write(events: Iterable[Event], path: Path) -> None:
    """One line of JSON per event, for people; payloads as their length."""
    with path.open("w") as file:
        for event in events:
            file.write(json.dumps(asdict(event) | {"payload": len(event.payload)}) + "\n")
