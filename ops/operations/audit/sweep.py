"""One audit: look at everything, then again at what seemed wrong, and report what stays wrong.

A pool is too large for one step of Redis, so keys and suspects are read in pieces while jobs move between them. A
finding therefore counts only if several looks at random moments all find it. The last looks read a job, its indexes and
the suspects in one step.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict
from typing import Any

from redis.asyncio import Redis

from .look import Looker
from .rules import KINDS, Finding, judge_job, judge_key, judge_member, judge_totals, kind_of

LOOKS, SEARCHES = 5, 2
"""Looks at a finding; the last SEARCHES of them search the suspects in the same step."""
TOTAL_LOOKS = 20
"""Looks at the counters. Counters that no look can judge are reported as not judged."""

Progress = Callable[[int, int | None, str], None]


class Sweep:
    """One run over one pool."""

    def __init__(self, redis: Redis, pool: str, progress: Progress, pause_s: float, most: int) -> None:
        """pause_s: longest time between two looks at the same thing. most: violations that are reported."""
        self._look = Looker(redis, pool)
        self._progress = progress
        self._pause_s, self._most = pause_s, most
        self._checked: Counter[str] = Counter(keys=0, jobs=0, entries=0, again=0, clients=0)
        self._unclear: list[str] = []
        self._broken = False

    async def run(self) -> dict[str, Any]:
        """{checked, violations: [{kind, key, detail}], more_violations, not_judged}."""
        found = await self._keys()
        unclear = self._unclear
        if self._broken:
            unclear.append("jobs, indexes and counters: a key of the wrong type is in the way")
        else:
            found += await self._members()
            totals, untold = await self._totals()
            found += totals
            unclear += untold
        return {
            "checked": dict(self._checked),
            "violations": [asdict(one) for one in found[: self._most]],
            "more_violations": max(0, len(found) - self._most),
            "not_judged": unclear,
        }

    async def _keys(self) -> list[Finding]:
        """Every key; and every job, beside the suspects as they were just before."""
        listed = await self._look.suspects() if await self._types_are_right() else {}
        odd: set[bytes] = set()
        jobs: set[bytes] = set()
        async for chunk in self._look.names():
            self._checked["keys"] += len(chunk)
            facts = await self._look.key_facts(chunk)
            odd |= {one.name for one in facts if judge_key(one)}
            ids = [one.name[4:] for one in facts if one.name.startswith(b"job:") and one.type == "hash"]
            if not self._broken:
                self._checked["jobs"] += len(ids)
                jobs |= {job.id for job in await self._look.job_facts(ids, listed=listed) if judge_job(job)}
            self._progress(self._checked["keys"], None, f"keys; {len(odd) + len(jobs)} to look at again")
        return (await self._keys_again(odd) if odd else []) + (await self._jobs_again(jobs) if jobs else [])

    async def _types_are_right(self) -> bool:
        """Whether the keys that all rules need can be read."""
        names = [name.encode() for name, key in KINDS.items() if key.life == "fixed"]
        facts = await self._look.key_facts(names)
        self._broken = any(one.type not in {"none", _type_of(one.name)} for one in facts)
        return not self._broken

    async def _keys_again(self, odd: set[bytes]) -> list[Finding]:
        found: list[Finding] = []
        async for _ in self._moments():
            found = [one for facts in await self._look.key_facts(sorted(odd)) for one in judge_key(facts)]
            odd = {one for one in odd if any(it.key == one.decode(errors="backslashreplace") for it in found)}
            if not odd:
                return []
        # Others cannot be read where a key is not what it should be.
        self._broken = self._broken or any(one.kind == "wrong_type" for one in found)
        return found

    async def _jobs_again(self, jobs: set[bytes]) -> list[Finding]:
        always: set[tuple[str, str]] | None = None
        found: list[Finding] = []
        async for look in self._moments():
            if not jobs:
                return []
            # Reading the suspects again leaves few to search them for.
            listed = None if look >= LOOKS - SEARCHES else await self._look.suspects()
            if listed is None and len(jobs) > self._most:
                self._unclear.append(f"jobs: {len(jobs) - self._most} more look wrong; repair what is reported first")
                jobs = set(sorted(jobs)[: self._most])
            seen = {job.id: judge_job(job) for job in await self._look.job_facts(sorted(jobs), listed=listed)}
            jobs = {job_id for job_id, wrong in seen.items() if wrong}
            found = [one for wrong in seen.values() for one in wrong]
            if listed is None:  # earlier looks may take one fault for another
                now = {(one.kind, one.key) for one in found}
                always = now if always is None else always & now
        return [one for one in found if (one.kind, one.key) in (always or ())]

    async def _members(self) -> list[Finding]:
        """Every entry of every index."""
        found: list[Finding] = []
        async for name, kind in self._indexes():
            index = name.decode(errors="surrogateescape")
            odd: set[bytes] = set()
            async for ids in self._look.members(index, kind):
                self._checked["entries"] += len(ids)
                odd |= {entry.id for entry in await self._look.member_facts(index, ids) if judge_member(entry)}
            self._progress(self._checked["entries"], None, "entries of indexes")
            if odd:
                found += await self._members_again(index, odd)
        return found

    async def _members_again(self, index: str, odd: set[bytes]) -> list[Finding]:
        found: list[Finding] = []
        async for _ in self._moments():
            facts = await self._look.member_facts(index, sorted(odd))
            odd = {entry.id for entry in facts if judge_member(entry)}
            found = [one for entry in facts for one in judge_member(entry)]
            if not odd:
                break
        return found

    async def _indexes(self) -> AsyncIterator[tuple[bytes, str]]:
        for start, key in KINDS.items():
            if key.index and not start.endswith(":"):
                yield start.encode(), key.type
            elif key.index:
                async for chunk in self._look.names(start, key.type):
                    for name in chunk:
                        yield name, key.type

    async def _totals(self) -> tuple[list[Finding], list[str]]:
        """The counters, once two looks agree; else what could not be judged."""
        always: set[str] | None = None
        judged, unclear, found = 0, [""], list[Finding]()
        for _ in range(TOTAL_LOOKS):
            before = await self._look.accepted()
            clients = {name async for chunk in self._look.names("client:", "set") for name in chunk}
            self._checked["clients"] = len(clients)
            totals = await self._look.totals([name.removeprefix(b"client:") for name in sorted(clients)])
            found, unclear = judge_totals(totals, totals.load.get("accepted", 0) - before)
            if not unclear or totals.nbytes is None:
                now = {one.kind for one in found}
                always = now if always is None else always & now
                judged += 1
            if (judged and not always) or judged >= LOOKS:
                break
            await self._pause()
        return [one for one in found if one.kind in (always or ())], unclear

    async def _moments(self) -> AsyncIterator[int]:
        """The looks at a finding. Pauses between them are random, so that they keep step with nothing in the pool."""
        for look in range(LOOKS):
            await self._pause()
            self._checked["again"] += 1
            yield look

    async def _pause(self) -> None:
        await asyncio.sleep(self._pause_s * random.uniform(0.3, 1.0))


def _type_of(name: bytes) -> str:
    kind = kind_of(name)
    return kind.type if kind else ""
