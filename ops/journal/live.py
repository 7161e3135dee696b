"""A job as the pool has it now: read from Redis, and nothing is changed there."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ...messages.broker import Broker, DeadFilter, DeadLetters, living_workers, needed, read_jobs
from ...messages.codec import decode
from ...messages.errors import MessageError
from ...messages.model import PRIORITIES, GenerateJob, Partial
from ...messages.redis import ADAPTERS_FROM, JOB, PROGRESS, later_member, piece_field, text, whole
from .lines import clock, plain, prompt_of

SHOWN_SAMPLES = 16
"""Of so many unfinished samples what they have saved is read."""
READ_BYTES = 4 << 20
"""A job whose payload is larger is not read."""
LETTERS = 1024
"""So many dead letters are looked through, the newest first."""
_STATES = {"q": "queued", "r": "running"}
_FIELDS = (
    "state", "samples", "priority", "client", "nbytes", "accepted", "deadline", "min_version", "max_staleness",
    "adapter", "group", "owner", "lost", "ending", "attempt", "published", "turn", "moves",
)  # fmt: skip


@dataclass(slots=True)
class Live:
    """A job's record in Redis. Of a job that has ended only its state is left, and a dead one's letter.

    at: by the pool's clock, in seconds since 1970. ahead: jobs before it in its queue, by turns; None if it is in
    none. waits: what it waits for besides its turn. partials: of unfinished samples, the tokens that are saved and the
    versions that sampled the last piece.
    """

    job_id: str
    state: str
    facts: dict[str, Any] = field(default_factory=dict)
    job: GenerateJob | None = None
    problem: str = ""
    published: list[int] = field(default_factory=list)
    partials: dict[int, dict[str, Any]] = field(default_factory=dict)
    more_partials: int = 0
    ahead: int | None = None
    waits: str = ""
    letter: dict[str, Any] = field(default_factory=dict)

    def as_data(self) -> dict[str, Any]:
        """For JSON."""
        told = {"job_id": self.job_id, "state": self.state} | self.facts
        told |= {"published": self.published, "partials": self.partials, "ahead": self.ahead, "waits": self.waits}
        told |= {"job": None if self.job is None else plain(self.job), "problem": self.problem}
        return told | {"dead_letter": self.letter or None}

    def lines(self) -> list[str]:
        """For people."""
        lines = [f"job {self.job_id}", f"  {self.state}"]
        if not self.facts:
            lines[1] += "; Redis has no more of a job that has ended, a journal has (--journal)"
        for name, value in self.facts.items():
            if value is not None:
                lines.append(f"  {name.replace('_', ' ')}: {clock(value) if name.endswith('_at') else value}")
        if self.job is not None:
            lines.append(f"  prompt of {prompt_of(self.job)}; n={self.job.n}")
        lines += [f"  {self.problem}"] if self.problem else []
        if self.ahead is not None:
            lines.append(f"  {self.ahead:,} jobs before it in its queue")
        lines += [f"  waits for {self.waits}"] if self.waits else []
        if self.published:
            lines.append(f"  published: {len(self.published):,} samples ({_ranges(self.published)})")
        for sample, saved in self.partials.items():
            versions = ", ".join(map(str, saved["versions"]))
            lines.append(f"  sample {sample}: {saved['tokens']:,} tokens saved, the last ones by version {versions}")
        if self.more_partials:
            lines.append(f"  {self.more_partials:,} more unfinished samples have saved tokens")
        lines += [f"  {name}: {str(value)[:400]}" for name, value in self.letter.items() if value]
        return lines


async def live_of(broker: Broker, job_id: str) -> Live | None:
    """The job as the pool has it; None if Redis does not know it."""
    home = broker.parts[0]
    broker = next(part for part in broker.parts if part.has(job_id))
    redis, keys = broker.redis, broker.keys
    (found,) = await read_jobs(redis, keys, [job_id], *_FIELDS)
    if "state" not in found:
        return None
    state = text(found["state"])
    live = Live(job_id, _STATES.get(state, state))
    if state not in _STATES:
        if state == "dead":
            live.letter = await _letter(broker, job_id)
        return live
    live.facts = _facts(found)
    await _read_payload(broker, live, whole(found.get("nbytes")))
    await _read_progress(broker, live)
    if state == "r" and (worker := live.facts["worker"]) and worker not in await living_workers(home.redis, home.keys):
        live.waits = f"another worker: the lease of {worker} has run out"
    if state == "q":
        await _find_place(broker, live, whole(found.get("priority")), whole(found.get("turn")))
    return live


def _facts(found: dict[str, bytes]) -> dict[str, Any]:
    told = {name: text(found[name]) if name in found else None for name in _FIELDS}
    count = {name: whole(found.get(name)) for name in _FIELDS if name != "min_version"}
    priority = count["priority"]
    return {
        "client": told["client"], "group": told["group"],
        "samples": count["samples"], "samples_published": count["published"],
        "priority": PRIORITIES[priority] if priority < len(PRIORITIES) else told["priority"],
        "accepted_at": count["accepted"] / 1000, "deadline_at": count["deadline"] / 1000 if told["deadline"] else None,
        "attempt": count["attempt"], "lost_leases": count["lost"], "moves": count["moves"],
        "worker": told["owner"] or None, **_version_of(told["min_version"]),
        "max_staleness": told["max_staleness"] or None, "adapter": told["adapter"] or None,
        "ending": bool(told["ending"]) or None, "payload_bytes": count["nbytes"],
    }  # fmt: skip


def _version_of(said: str | None) -> dict[str, int | None]:
    exact = bool(said) and str(said).startswith("=")
    number = whole((said or "").lstrip("=").encode() or None)
    return {"min_version": None if exact else number or None, "exact_version": number if exact else None}


async def _read_payload(broker: Broker, live: Live, nbytes: int) -> None:
    if nbytes > READ_BYTES:
        live.problem = f"its payload has {nbytes:,} bytes and is not read"
        return
    try:
        (found,) = await read_jobs(broker.redis, broker.keys, [live.job_id], "payload")
        live.job = decode(found.get("payload", b""), GenerateJob)
    except MessageError as error:  # a task, damaged, or of a newer version
        live.problem = f"its payload cannot be read: {error}"


async def _read_progress(broker: Broker, live: Live) -> None:
    """Which samples are published, and how far the saved ones are: the last piece of each says it."""
    key = broker.keys.job(live.job_id)
    last: dict[int, int] = {}
    for name in await broker.redis.hkeys(key):
        if (found := PROGRESS.fullmatch(text(name))) is None:
            continue
        sample = int(found[2])
        if found[1] == JOB.sample:
            live.published.append(sample)
        else:
            last[sample] = max(last.get(sample, 0), int(found[3] or 0))
    live.published.sort()
    shown = sorted(last.keys() - {*live.published})
    live.more_partials = len(shown[SHOWN_SAMPLES:])
    for sample in shown[:SHOWN_SAMPLES]:
        piece = await broker.redis.hget(key, piece_field(sample, last[sample]))
        try:
            saved = decode(piece or b"", Partial)
        except MessageError:
            continue  # published or dropped since, or of a newer version
        versions = [segment.version for segment in saved.segments]
        live.partials[sample] = {"tokens": saved.start + len(saved.token_ids), "versions": versions}


async def _find_place(broker: Broker, live: Live, priority: int, turn: int) -> None:
    redis, keys = broker.redis, broker.keys
    if priority >= len(PRIORITIES):
        return
    live.ahead = await redis.zrank(keys.queues[priority], live.job_id)
    if live.ahead is not None:
        return
    if (score := await redis.zscore(keys.later[priority], later_member(turn, live.job_id))) is not None:
        live.waits = await _what_comes(broker, score)
    elif (place := await redis.lpos(keys.suspects, live.job_id)) is not None:
        live.waits = f"its last chance alone on a worker, behind {place} others: workers died that had it"


async def _what_comes(broker: Broker, score: float) -> str:
    """What a job waits for that is in `later` at this score."""
    if (needs := await needed(broker.redis, broker.keys, score)) is not None:
        names, context = needs
        return f"a worker whose engine has {', '.join(names) or '?'}, and {context:,} tokens of context"
    if score <= -ADAPTERS_FROM:
        return f"a worker that has exactly weights version {int(-score) - ADAPTERS_FROM}"
    told = "the worker that it prefers" if score < 0 else f"weights version {int(score % ADAPTERS_FROM)}"
    return f"{told} of its adapter" if score >= ADAPTERS_FROM else told


async def waiting_of(broker: Broker, limit: int) -> dict[str, str]:
    """Jobs that wait, by id, and for what besides their turn; "" for nothing. The first `limit` of each queue, of what
    is put aside, and of last chances. Raises RedisError."""
    found: dict[str, str] = {}
    for part in broker.parts:
        redis: Any = part.redis
        async with redis.pipeline(transaction=False) as pipe:
            for place in (*part.keys.queues, *part.keys.later):
                pipe.zrange(place, 0, limit - 1, withscores=True)
            pipe.lrange(part.keys.suspects, 0, limit - 1)
            *places, suspects = [it if isinstance(it, list) else [] for it in await pipe.execute(raise_on_error=False)]
        count = len(part.keys.queues)
        later = [(text(member).rpartition(":")[2], score) for one in places[count:] for member, score in one]
        told = {score: await _what_comes(part, score) for score in {score for _, score in later}}
        found |= {text(member): "" for one in places[:count] for member, _ in one}
        found |= {job: told[score] for job, score in later}
        found |= {text(one): "its last chance alone on a worker: workers died that had it" for one in suspects}
    return found


async def _letter(broker: Broker, job_id: str) -> dict[str, Any]:
    async for letter in DeadLetters(broker).find(DeadFilter(limit=LETTERS)):
        if letter.job_id == job_id:
            names = ("cause", "error", "host", "attempts", "at", "entry_id")
            return {name: getattr(letter, name) for name in names}
    return {}


def _ranges(numbers: list[int]) -> str:
    """0 to 3, 5, 7 to 9; cut off after a few."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    told = [str(first) if first == last else f"{first} to {last}" for first, last in ranges]
    return ", ".join(told[:12]) + (f" and {len(told) - 12} more ranges" if len(told) > 12 else "")
