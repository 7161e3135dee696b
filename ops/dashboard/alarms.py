"""The alarms that there are, each with the paragraph that explains it; a test compares these with the documentation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

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


class Usual(NamedTuple):
    """What is always the same of a kind of alarm."""

    severity: Literal["error", "warn"]
    title: str
    doc: str
    text: str


KINDS: Mapping[Kind, Usual] = {
    "workers-die": Usual("warn", "Workers died", f"{DOCS}#rolloutmqleaseslost",
        "Their jobs went to others. Look for pre-emption, a lack of memory, and at the way to Redis."),
    "engines-die": Usual("warn", "Engines died and were started again", f"{DOCS}#enginedead",
        "If it repeats, lower --mem-fraction or --max-running; a job that kills engines ends in the dead letters."),
    "stalled": Usual("warn", "A worker has samples in its engine, and makes nothing", f"{DOCS}#rolloutmqworkerstalled",
        "Read its log, and stop it if its engine hangs: its jobs go to others."),
    "sync-failed": Usual("warn", "A worker refused a version", f"{DOCS}#rolloutmqsyncfailed",
        "It serves the one it had. See why with rolloutmq weights list, then publish again."),
    "snapshot-broken": Usual("error", "A version on disk is damaged", f"{DOCS}#further-errors",
        "Bytes of a snapshot differ from their digests. Publish that version again, or remove the snapshot."),
    "stale-samples": Usual("warn", "Samples are more than four versions old", f"{DOCS}#rolloutmqstalesamples",
        "Run fewer workers, let the trainer submit less ahead (Staleness(eta=…)), or give jobs a max_staleness."),
    "reward-fell": Usual("error", "The reward fell", "docs/dashboard.md#the-reward-fell",
        "See what changed at that version: the reward's code and sign, the data, the learning rate, the weights."),
    "jobs-fail": Usual("warn", "Jobs were given up", f"{DOCS}#rolloutmqdeadletters",
        "Repair the cause, then requeue the group, or drop it with rolloutmq dead drop."),
    "never-claimed": Usual("error", "Jobs were accepted, and never claimed", f"{DOCS}#why-does-my-job-not-run",
        "No worker of the run has what they ask for, or none had room. Start one that has it, or cancel them."),
    "near-cap": Usual("warn", "The pool is nearly full", f"{DOCS}#rolloutmqnearcap",
        "Submissions will be refused. Take results, or drop what absent clients left with rolloutmq replies."),
    "redis-memory": Usual("error", "Redis has nearly no memory left", f"{DOCS}#rolloutmqredismemory",
        "At the limit it takes no writes. Give it more memory, or lower the caps."),
    "journal-lost": Usual("warn", "The journal has dropped entries", "docs/journal.md#what-is-promised",
        "Its disk was too slow, so some figures here are too low."),
}  # fmt: skip
