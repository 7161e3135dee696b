"""What a pool at rest may hold: rule (d)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis

from .ledger import Event
from .oracle import Terms, Verdict

TAMPERED_BYTES = 4096
"""Most that one tampered record may throw the counter of bytes off by."""
BELL_MOST = 700
"""The bell is trimmed to about 512 entries, by whole nodes of the stream."""

STAYS = frozenset({"bell", "load", "needs", "dead", "letters", "turns", "weights", "holders", "transfers", "clock"})
STAYS |= {"gateways", "answered"}
"""Keys without a TTL that stay: bell, counters, dead letters (the newest 10,000), tenants' next turns until a worker
looks again, newest weights and who offers them, the newest reports of transfers (about 1,024), the pool's
clock, what gateways have left to the next one, and which answers are kept, until the next request."""


@dataclass(frozen=True, slots=True)
class Size:
    """A key at rest. ttl_ms: -1 for none."""

    kind: str
    count: int
    ttl_ms: int


@dataclass(frozen=True, slots=True)
class Rest:
    """The keys of a pool, without its prefix, and its counters."""

    keys: dict[str, Size]
    load: dict[str, int]


async def look(redis: Redis, prefix: str, home: str) -> Rest:
    """Every key of the pool with its size.

    home: the first shard's prefix. Every server has a `load` of it, which says the addresses of all.
    """
    db: Any = redis
    sizes = {b"hash": db.hlen, b"set": db.scard, b"list": db.llen}
    sizes |= {b"stream": db.xlen, b"zset": db.zcard, b"string": db.strlen}
    found: dict[str, Size] = {}
    async for key in db.scan_iter(count=1000):
        kind = await db.type(key)
        if kind in sizes:
            name = key.decode(errors="replace")  # scenarios write garbage, too
            if prefix != home and name == f"{home}load" and set(await db.hkeys(key)) == {b"servers"}:
                continue
            name = name.removeprefix(prefix)
            found[name] = Size(kind.decode(), await sizes[kind](key), await db.pttl(key))
    counters = await db.hgetall(f"{prefix}load")
    return Rest(
        found,
        {name.decode(errors="replace"): int(value) for name, value in counters.items() if value.lstrip(b"-").isdigit()},
    )


def judge_rest(before: Rest, after: Rest, events: list[Event], verdict: Verdict, terms: Terms | None = None) -> None:
    """Complain about whatever is left over, and about counters that do not add up."""
    terms = terms or Terms()
    ends = Counter(event.outcome for event in events if event.kind == "terminal")
    letters = sum(event.kind == "letter" for event in events)
    for key, size in after.keys.items():
        family, _, rest = key.partition(":")
        if (family == "job" and rest in terms.tampered) or (family == "client" and rest in terms.unread):
            continue
        if why := _leaked(key, size, letters, before.keys.get(key), terms.unread):
            verdict.leaked_keys += 1
            verdict.complain("d", f"{key} ({size.kind} of {size.count}, ttl {size.ttl_ms} ms): {why}")
    totals = {"accepted": sum(event.kind == "accept" for event in events)} | dict(ends)
    expected = {"jobs": 0, "bytes": 0} | totals | ({} if terms.unread else {"unread": 0})
    for name, count in expected.items():
        off = abs(after.load.get(name, 0) - count - before.load.get(name, 0))
        if off > len(terms.tampered) * (TAMPERED_BYTES if name == "bytes" else 1):
            verdict.complain("d", f"load.{name} is {after.load.get(name, 0)}, the ledger says {count}")


def _leaked(key: str, size: Size, letters: int, before: Size | None, unread: frozenset[str]) -> str:
    """Why a key may not be here; empty if it may."""
    family, _, rest = key.partition(":")
    why = ""
    if family == "reply":
        why = "results that were handed over are still on it" if size.count and rest not in unread else ""
    elif family == "bell":
        why = "longer than it is trimmed to" if size.count > BELL_MOST else ""
    elif family == "dead":
        why = f"{letters} dead letters were written" if size.count != letters else ""
    elif size.ttl_ms < 0 and family not in STAYS and not (unread and family == "unread"):
        why = "no TTL, and not on the list of what stays"
    return why if before is None or size.count > before.count else ""
