"""The rules for each key, job, index entry and counter; messages/redis/keys.py has the kinds of keys.

Every rule judges facts that were read in one step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ....messages.redis import KEYS, Key
from .look import JobFacts, KeyFacts, MemberFacts, Totals

KINDS = {name: key for key in KEYS for name in key.names}
"""By the whole name of a key, or its beginning where that ends with ":"."""


def kind_of(name: bytes) -> Key[object] | None:
    """The kind of a key, by its name without the pool's prefix; None if no part of a pool has such keys."""
    text = name.decode(errors="replace")
    start, _, rest = text.partition(":")
    each = KINDS.get(f"{start}:") if rest else None
    return each or (None if text.endswith(":") else KINDS.get(text))


OPEN = {"q", "r"}
ENDED = {"done", "cancelled", "expired", "dead"}


@dataclass(frozen=True, slots=True)
class Finding:
    """A rule that does not hold. kind: the rule; key: where, without the pool's prefix; detail: what was seen."""

    kind: str
    key: str
    detail: str


def judge_key(facts: KeyFacts) -> list[Finding]:
    """Known, of its type, and with an end: a TTL, or somebody it belongs to."""
    if facts.type == "none":
        return []
    name, kind = facts.name.decode(errors="backslashreplace"), kind_of(facts.name)
    wrong: tuple[str, str] | None = None
    if kind is None:
        ttl = "without a TTL" if facts.ttl_ms < 0 else f"with a TTL of {facts.ttl_ms} ms"
        wrong = ("unknown_key", f"a {facts.type} {ttl} that no part of a pool writes")
    elif not kind.type:
        wrong = ("set_aside", f"a {facts.type} that was in the way; it is kept for a day")
    elif facts.type != kind.type:
        wrong = ("wrong_type", f"a {facts.type}, should be a {kind.type}")
    elif kind.life == "ttl" and facts.ttl_ms < 0:
        wrong = ("no_ttl", "will stay for ever")
    elif kind.life in {"fixed", "worker", "client"} and facts.ttl_ms >= 0:
        wrong = ("unexpected_ttl", f"would be forgotten in {facts.ttl_ms} ms")
    elif kind.life == "worker" and not facts.owned:
        wrong = ("orphan", "its worker is not registered: nobody takes this back")
    return [Finding(wrong[0], name, wrong[1])] if wrong else []


def judge_job(job: JobFacts) -> list[Finding]:
    """A job is in the indexes that its state demands, and in no other."""
    wrong: list[tuple[str, str]] = []
    if job.state in ENDED:
        if job.ttl_ms < 0:
            wrong = [("no_ttl", f"{job.state}, and would be remembered for ever")]
    elif job.state in OPEN:
        wrong = _open(job) + (_running(job) if job.state == "r" else _queued(job))
    elif job.state:
        wrong = [("unknown_state", f"state {job.state!r}")]
    # Without a state it is gone; an index that still names it is found with the index.
    key = f"job:{job.id.decode(errors='backslashreplace')}"
    return [Finding(kind, key, detail) for kind, detail in wrong]


def _open(job: JobFacts) -> list[tuple[str, str]]:
    wrong: list[tuple[str, str]] = []
    if job.ttl_ms >= 0:
        wrong.append(("unexpected_ttl", f"open, and would be forgotten in {job.ttl_ms} ms"))
    if not job.in_client:
        wrong.append(("not_in_client", f"open, but not among the jobs of its client {job.client!r}"))
    if job.deadline and job.in_deadlines != job.deadline:
        has = job.in_deadlines or "nothing"
        wrong.append(("not_in_deadlines", f"its deadline is {job.deadline}, deadlines has {has}"))
    return wrong


def _running(job: JobFacts) -> list[tuple[str, str]]:
    wrong: list[tuple[str, str]] = []
    if not job.leased:
        wrong.append(("no_owner", f"running at worker {job.owner!r}, which is not registered: nobody takes it back"))
    if not job.held:
        wrong.append(("not_held", f"running at worker {job.owner!r}, which does not hold it"))
    return wrong


def _queued(job: JobFacts) -> list[tuple[str, str]]:
    wrong: list[tuple[str, str]] = []
    if job.owner:
        wrong.append(("queued_with_owner", f"queued, and owned by worker {job.owner!r}"))
    if not job.places:
        wrong.append(("not_queued", "queued, but in no queue: nobody will ever run it"))
    elif len(job.places) > 1:
        wrong.append(("queued_twice", f"queued {len(job.places)} times: in {', '.join(sorted(job.places)[:8])}"))
    elif job.places[0] not in {f"queued:{job.klass}", f"later:{job.klass}", "suspects"}:
        wrong.append(("wrong_queue", f"of class {job.klass}, but queued in {job.places[0]}"))
    return wrong


MEMBERS: dict[str, tuple[str, Callable[[MemberFacts, str], bool], str]] = {
    "held": ("held_wrongly", lambda job, worker: job.state == "r" and job.owner == worker, "held"),
    "client": (
        "client_wrongly",
        lambda job, client: job.state in OPEN and job.client == client,
        "among a client's open jobs",
    ),
    "deadlines": (
        "deadline_wrongly",
        lambda job, _: job.state in OPEN and job.deadline == job.score,
        "has deadline {0.score}",
    ),
    "queued": ("queued_wrongly", lambda job, klass: job.state == "q" and job.klass == klass, "queued"),
    "later": ("later_wrongly", lambda job, klass: job.state == "q" and job.klass == klass, "set aside"),
    "prefers": ("prefers_wrongly", lambda job, _: job.state == "q", "left to the worker it prefers"),
}
"""(name of the rule, whether an entry is right, what the index says of it), by the first word of the index's key."""


def judge_member(entry: MemberFacts) -> list[Finding]:
    """Every entry of an index is a job that belongs there."""
    first, _, rest = entry.index.partition(":")
    kind, is_right, told = MEMBERS[first]
    if not entry.member or is_right(entry, rest):
        return []
    why = f"{told.format(entry)}, but the job is {_said(entry)}"
    return [Finding(kind, entry.index, f"job {entry.id.rpartition(b':')[2].decode(errors='backslashreplace')} {why}")]


def judge_totals(totals: Totals, newly_accepted: int) -> tuple[list[Finding], list[str]]:
    """(what is wrong, what cannot be told now). newly_accepted: jobs that clients not looked at may have, at most.

    Counted jobs may therefore be fewer than `load` says, by that many; nothing else is allowed to differ.
    """
    found: list[Finding] = []
    open_jobs, accepted, unread, letters = (
        totals.load.get(name, 0) for name in ("jobs", "accepted", "unread", "letters")
    )

    def wrong(kind: str, detail: str) -> None:
        found.append(Finding(kind, "load", detail))

    if open_jobs != accepted - totals.ended:
        wrong("load_jobs", f"jobs {open_jobs}, but {accepted} were accepted and {totals.ended} ended")
    if unread != totals.unread:
        wrong("load_unread", f"unread {unread}, but clients have {totals.unread}")
    if letters != totals.letters:
        wrong("load_letters", f"letters {letters}, but dead letters have {totals.letters}")
    missing = open_jobs - totals.jobs
    if not 0 <= missing <= newly_accepted:
        wrong("load_jobs", f"jobs {open_jobs}, but clients have {totals.jobs} open")
    if totals.nbytes is None:
        return found, [f"load.bytes and load.saved: {totals.jobs} jobs are too many to add up in one step"]
    if missing > 0 and not found:
        return found, ["load.bytes and load.saved: clients come and go faster than they can be looked at"]
    for name, counted in (("bytes", totals.nbytes), ("saved", totals.saved)):
        if missing == 0 and (said := totals.load.get(name, 0)) != counted:
            wrong(f"load_{name}", f"{name} {said}, but open jobs have {counted}")
    return found, []


def _said(entry: MemberFacts) -> str:
    if not entry.state:
        return "not there"
    return f"{entry.state} (worker {entry.owner!r}, client {entry.client!r}, deadline {entry.deadline or 'none'})"
