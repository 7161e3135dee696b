"""The alarms that there are, each with the paragraph that explains it; a test compares these with the documentation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

Severity = Literal["error", "warn", "note"]
Kind = Literal[
    "workers-die", "engines-die", "stalled", "sync-failed", "snapshot-broken", "stale-samples", "reward-fell",
    "jobs-fail", "never-claimed", "near-cap", "redis-memory", "journal-lost",
]  # fmt: skip
DOCS = "docs/troubleshooting.md"


@dataclass(frozen=True, slots=True)
class Alarm:
    """Something to look at. since: Unix seconds, None if nobody knows. evidence: with figures and names.

    text: what it means and what to do. doc: where more is said.
    """

    id: str
    severity: Severity
    title: str
    since: float | None
    evidence: str
    text: str
    doc: str

    def as_data(self) -> dict[str, Any]:
        """For the page."""
        return asdict(self)


class Usual(NamedTuple):
    """What is always the same of a kind of alarm."""

    severity: Literal["error", "warn"]
    title: str
    text: str
    doc: str


KINDS: Mapping[Kind, Usual] = {
    "workers-die": Usual(
        "warn",
        "Workers died",
        "Their jobs went to others. Look for pre-emption, a lack of memory, and at the way to Redis.",
        f"{DOCS}#rolloutmqleaseslost",
    ),
    "engines-die": Usual(
        "warn",
        "Engines died and were started again",
        "If it repeats, lower --mem-fraction or --max-running; a job that kills engines ends in the dead letters.",
        f"{DOCS}#enginedead",
    ),
    "stalled": Usual(
        "warn",
        "A worker has requests in its engine, and generates nothing",
        "Read its log, and stop it if its engine hangs: its jobs go to others.",
        f"{DOCS}#rolloutmqworkerstalled",
    ),
    "sync-failed": Usual(
        "warn",
        "A worker refused a version",
        "It serves the one it had. See why with rolloutmq weights list, then publish again.",
        f"{DOCS}#rolloutmqsyncfailed",
    ),
    "snapshot-broken": Usual(
        "error",
        "A version on disk is damaged",
        "Bytes of a snapshot differ from their digests. Publish that version again, or remove the snapshot.",
        f"{DOCS}#further-errors",
    ),
    "stale-samples": Usual(
        "warn",
        "Samples are more than four versions old",
        "Run fewer workers, let the trainer submit less ahead (Staleness(eta=…)), or give jobs a max_staleness.",
        f"{DOCS}#rolloutmqstalesamples",
    ),
    "reward-fell": Usual(
        "error",
        "The reward fell",
        "See what changed at that version: the reward's code and sign, the data, the learning rate, the weights.",
        "docs/dashboard.md#the-reward-fell",
    ),
    "jobs-fail": Usual(
        "warn",
        "Jobs were given up",
        "Repair the cause, then requeue the group, or drop it with rolloutmq dead drop.",
        f"{DOCS}#rolloutmqdeadletters",
    ),
    "never-claimed": Usual(
        "error",
        "Jobs were accepted, and no worker ever claimed them",
        "No worker of the run has what they ask for, or none had room. Start one that has it, or cancel them.",
        f"{DOCS}#why-does-my-job-not-run",
    ),
    "near-cap": Usual(
        "warn",
        "The pool is nearly full",
        "Submissions will be refused. Take results, or drop what absent clients left with rolloutmq replies.",
        f"{DOCS}#rolloutmqnearcap",
    ),
    "redis-memory": Usual(
        "error",
        "Redis has nearly no memory left",
        "At the limit it takes no writes. Give it more memory, or lower the caps.",
        f"{DOCS}#rolloutmqredismemory",
    ),
    "journal-lost": Usual(
        "warn",
        "The journal has dropped entries",
        "Its disk was too slow, so some figures here are too low.",
        "docs/journal.md#what-is-promised",
    ),
}
