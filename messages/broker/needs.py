"""What a job needs of an engine, and what an engine can do, as the scripts compare them.

Both are a text: a length of context in tokens, then names. A worker gets a job if its length is not smaller and it has
every name. Names are those of optional features, as in GenerateJob.unsupported. `generate` stands for generating at
all, which engines of embedding and reward models do not do.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from redis.exceptions import ResponseError

from ..codec import Job
from ..model import PRIORITIES, GenerateJob
from ..redis import SLOT, SLOTS_FROM, Keys, is_wrong_type, text, whole

GENERATE = "generate"
PLAIN_CONTEXT = 1024
"""A job without optional features that needs no longer context says nothing: every engine is expected to run it."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """Jobs that were put aside because only other workers' engines can do them.

    names: what they need, sorted. possible: whether a worker that is there has all of these names. Its context may
    still be too short, or it may be busy. context: the longest of such a worker, in tokens. too_long: of the jobs,
    those that need a longer one.
    """

    names: tuple[str, ...]
    jobs: int
    possible: bool
    context: int = 0
    too_long: int = 0


async def read_waiting(redis: Any, keys: Keys) -> list[Waiting]:
    """What jobs wait for, most jobs first. One command in a pool whose workers are all alike."""
    try:
        known = {text(name): whole(value) for name, value in (await redis.hgetall(keys.needs)).items()}
    except ResponseError as error:
        if not is_wrong_type(error):
            raise
        return []  # the next claim sets it aside
    slots = _slots(known)
    if not slots:
        return []
    async with redis.pipeline(transaction=False) as pipe:
        pipe.hget(keys.clock, "at")
        for slot in slots.values():
            for later in keys.later:
                pipe.zcount(later, SLOTS_FROM + slot * SLOT, SLOTS_FROM + (slot + 1) * SLOT - 1)
        at, *counts = await pipe.execute()
    there = [
        (whole(name[4:].split()[0].encode()), frozenset(name[4:].split()[1:]))
        for name, until in known.items()
        if name.startswith("can:") and len(name) > len("can:") and until > whole(at)
    ]
    found = []
    for number, names in enumerate(slots):
        jobs = sum(counts[number * len(PRIORITIES) : (number + 1) * len(PRIORITIES)])
        if jobs:
            wanted = tuple(names.split())
            features = [name for name in wanted if not name.startswith("version=")]
            contexts = [context for context, has in there if has.issuperset(features)]
            longest = max(contexts, default=0)
            too_long = await _too_long(redis, keys, slots[names], longest) if contexts else 0
            found.append(Waiting(wanted, jobs, bool(contexts), longest, too_long))
    return total_of([found])


async def needed(redis: Any, keys: Keys, score: float) -> tuple[list[str], int] | None:
    """What a job with this score in `later` needs of an engine, and tokens of context; None if it needs neither."""
    if score < SLOTS_FROM:
        return None
    slot, context = divmod(int(score) - SLOTS_FROM, SLOT)
    known = {text(name): whole(value) for name, value in (await redis.hgetall(keys.needs)).items()}
    names = next((names for names, number in _slots(known).items() if number == slot), "")
    return names.split(), context


def _slots(known: Mapping[str, int]) -> dict[str, int]:
    """Of the hash `needs`: what jobs wait for -> its number in their scores."""
    return {name.removeprefix("slot:"): slot for name, slot in known.items() if name.startswith("slot:")}


async def _too_long(redis: Any, keys: Keys, slot: int, context: int) -> int:
    """How many jobs of a slot need a longer context than this one."""
    first, last = SLOTS_FROM + slot * SLOT + context + 1, SLOTS_FROM + (slot + 1) * SLOT - 1
    return sum([await redis.zcount(later, first, last) for later in keys.later])


def total_of(shards: Iterable[Iterable[Waiting]]) -> list[Waiting]:
    """What jobs wait for in all shards of a pool, most jobs first."""
    total: dict[tuple[str, ...], Waiting] = {}
    for one in (one for found in shards for one in found):
        before = total.get(one.names)
        total[one.names] = one if before is None else _sum(before, one)
    return sorted(total.values(), key=lambda one: (-one.jobs, one.names))


def _sum(one: Waiting, other: Waiting) -> Waiting:
    possible, context = one.possible or other.possible, max(one.context, other.context)
    return Waiting(one.names, one.jobs + other.jobs, possible, context, one.too_long + other.too_long)


def needs_of(job: Job) -> str:
    """What the job needs; "" for a plain one.

    Only the tokens that are known when it is submitted count: those of a prompt that is text come with the worker that
    tokenises it.
    """
    names, context = job.features_used(), 0
    if isinstance(job, GenerateJob):
        known = job.token_ids if job.token_ids is not None else job.context_ids
        context = (1 if known is None else max(1, len(known))) + job.sampling.max_new_tokens
        if not names and context <= PLAIN_CONTEXT:
            return ""
        names = [GENERATE, *names]
    return _text(context, names)


def can_of(context_length: int, features: Iterable[str], generates: bool) -> str:
    """What an engine can do. generates: whether it does so at all."""
    return _text(context_length, [*features, *([GENERATE] if generates else ())])


def kin_of(can: str) -> str:
    """A name for all workers that can do just this, who share a wake-up token."""
    return f"can-{hashlib.sha1(can.encode(), usedforsecurity=False).hexdigest()[:16]}"


def _text(context: int, names: Iterable[str]) -> str:
    return " ".join([str(context), *sorted(names)])
