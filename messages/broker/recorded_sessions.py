"""Recorded sessions: the turns of agents that a gateway serves, kept until a trainer takes them.

A session has a tenant and a name. Its turns are results that know their prompts, in the order in which they came. All
sessions of a pool are in its home shard. They stay for a day after their last turn; what ends then and nobody has taken
is counted (`PoolLoad.sessions_expired`).

A turn's prompt usually begins with an earlier turn's prompt and output. That part is stored once: a turn says how much
of which other one it begins with. So a conversation takes memory in proportion to its length, not to its square.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..codec import decode, encode
from ..errors import InvalidField, MalformedMessage, NoSuchSession, RedisRefused, TurnRefused
from ..model import MAX_TOKENS, RolloutResult
from ..redis import SESSION, text, whole
from ..scripts import Scripts, calls
from .broker import Broker

IDLE_S = 86400.0
MAX_TURNS, MAX_SESSION_TOKENS, MAX_SESSION_BYTES = 4096, 1 << 26, 64 << 20
"""A session has at most so many turns, tokens in their prompts and outputs (64 Mi), and bytes in Redis (64 MiB)."""
POOL_SHARE = 4
"""All sessions together have at most this part of `Caps.nbytes`, a quarter."""
RECENT = 64
"""A turn's beginning is looked for among so many turns, the newest."""
PAGE = 256
_TENANT, _NAME = "[A-Za-z0-9_.-]{1,64}", "[A-Za-z0-9_.:/-]{1,128}"
_END = re.compile(r"(\d{1,7}):([0-9a-f]{32})")
_BEGINS = re.compile(rb"(\d{1,4}) (\d{1,7})")


@dataclass(frozen=True, slots=True)
class SessionSummary:
    """What is known of a recorded session without its turns.

    turns: how many. tokens: of their prompts and outputs together. nbytes: what it counts for in Redis. first_at,
    last_at: when its first and its last turn came, in Unix seconds by the pool's clock. taken: it takes no further
    turns.
    """

    tenant: str
    name: str
    turns: int
    tokens: int
    nbytes: int
    first_at: float
    last_at: float
    taken: bool


class _Beginning(NamedTuple):
    """The first tokens of a prompt: so many of an earlier turn, whose `ends` are known."""

    tokens: int = 0
    turn: int = 0
    ends: str = ""


class RecordedSessions:
    """The recorded sessions of a pool: a gateway records turns, a trainer takes them. Any number of both may work at
    the same time. Every call may be repeated after an error of the connection.

    Tenants have names of 1 to 64 letters, digits, `_`, `.` and `-`. Names of sessions, and keys of turns, have 1 to
    128, also with `:` and `/`. Each call raises InvalidField for others.
    """

    def __init__(self, broker: Broker, idle_s: float = IDLE_S) -> None:
        """idle_s: seconds that a session stays after its last turn, or after it was taken last."""
        home = broker.parts[0]
        self._redis, self._keys = home.redis, home.keys
        self._scripts = Scripts(home.redis, home.keys)
        self._idle_ms = int(idle_s * 1000)
        self._bounds = (MAX_TURNS, MAX_SESSION_TOKENS, MAX_SESSION_BYTES, home.caps.nbytes // POOL_SHARE)

    async def record(self, tenant: str, session: str, turn_key: str, result: RolloutResult) -> None:
        """Add a turn to a session; the first one begins the session. It is in when this returns.

        turn_key: names the turn within the session. A key that is in already changes nothing, whatever `result` is,
        also when the session was taken since. result: with `prompt_ids` and `logprobs`, of a sample that has ended.
        Raises InvalidField for a result without these, and TurnRefused, whose `reason` says why: the session was
        taken, or a bound is reached.
        """
        name = _session(tenant, session, turn_key)
        for field in ("prompt_ids", "logprobs"):
            if getattr(result, field) is None:
                raise InvalidField(field, None, "an array: a turn that is recorded can be trained on")
        answer = await self._record(name, turn_key, result, await self._recent(name))
        if answer == "again":  # the session was forgotten, and has begun anew
            answer = await self._record(name, turn_key, result, [])
        if answer != "ok":
            raise TurnRefused(f"session {session!r} of tenant {tenant!r}: {self._why(answer)}", answer)

    async def listed(self, tenant: str) -> AsyncGenerator[SessionSummary]:
        """The tenant's sessions, each once, in no order; read page by page. One that comes or goes meanwhile may be
        missing."""
        _session(tenant, "any")
        cursor, seen = 0, set[bytes]()
        while True:
            cursor, page = await self._redis.zscan(self._keys.sessions, cursor, match=f"{tenant}/*", count=PAGE)
            new = [name for name, _ in page if name not in seen]
            seen.update(new)
            fields = (SESSION.turns, SESSION.tokens, SESSION.nbytes, SESSION.first, SESSION.last, SESSION.closed)
            async with self._redis.pipeline(transaction=False) as pipe:
                for name in new:
                    pipe.hmget(self._keys.session(text(name)), fields)
                rows = await pipe.execute()
            for name, (*counts, closed) in zip(new, rows, strict=True):
                turns, tokens, nbytes, first, last = map(whole, counts)
                if turns:
                    its = (text(name).partition("/")[2], turns, tokens, nbytes, first / 1000, last / 1000)
                    yield SessionSummary(tenant, *its, closed is not None)
            if cursor == 0:
                return

    async def take(self, tenant: str, session: str) -> list[RolloutResult]:
        """Close a session and return its turns, in the order in which they came; again as often as it is asked.

        A turn that is recorded at the same time is either returned or refused. Raises NoSuchSession, and
        MalformedMessage, UnsupportedVersion or InvalidField if a turn cannot be read.
        """
        name, rows, turns = _session(tenant, session), list[bytes](), 1
        while len(rows) < 2 * turns:
            turns, *more = await self._scripts.run(calls.take_session(name, len(rows) // 2, self._idle_ms))
            if not more:
                told = "it was forgotten" if turns else "no turn has come to it yet, or it has expired"
                raise NoSuchSession(f"session {session!r} of tenant {tenant!r}: {told}", forgotten=turns > 0)
            rows += more
            if turns > MAX_TURNS or sum(map(len, rows)) > 2 * MAX_SESSION_BYTES:
                raise MalformedMessage(f"session {name!r}: {turns} turns are too many, or too large")
        return await asyncio.to_thread(_turns, rows[::2], rows[1::2])

    async def close(self, tenant: str, session: str) -> bool:
        """Have the session take no further turns; returns whether there is one."""
        turns, *_ = await self._scripts.run(calls.take_session(_session(tenant, session), MAX_TURNS, self._idle_ms))
        return bool(turns)

    async def taken(self, tenant: str, session: str) -> bool:
        """Whether the session takes no further turns."""
        return await self._redis.hget(self._keys.session(_session(tenant, session)), SESSION.closed) is not None

    async def forget(self, tenant: str, session: str) -> bool:
        """Delete a session with its turns, taken or not; returns whether there was one.

        For an hour no further turn is recorded under this name, so a late one does not begin the session again.
        """
        return bool(await self._scripts.run(calls.forget_session(_session(tenant, session))))

    async def _recent(self, name: str) -> list[_Beginning]:
        """What a prompt may begin with: the prompts, and the prompts with outputs, of the newest turns."""
        first, *recent = await self._scripts.run(calls.recent_turns(name, RECENT))
        ends = [(turn, text(its)) for turn, its in enumerate(recent, first)]
        return [_Beginning(int(end[1]), turn, its) for turn, its in ends for end in _END.finditer(its)]

    async def _record(self, name: str, turn_key: str, result: RolloutResult, known: list[_Beginning]) -> str:
        prompt = result.prompt_ids
        assert prompt is not None
        mine = (len(prompt), tokens := len(prompt) + len(result.token_ids))
        fitting = [one for one in known if one.tokens <= len(prompt)]
        whole_turn = np.concatenate([prompt, result.token_ids])
        digests = _prefix_digests(whole_turn, (*mine, *(one.tokens for one in fitting)))
        same = (one for one in fitting if f"{one.tokens}:{digests[one.tokens]}" in one.ends)
        begins = max(same, default=_Beginning())
        rest = encode(result.model_copy(update={"prompt_ids": prompt[begins.tokens :]}))
        ends = " ".join(f"{end}:{digests[end]}" for end in mine)
        said = f"{begins.turn} {begins.tokens}" if begins.tokens else ""
        call = calls.record_turn(name, turn_key, rest, ends, said, begins.ends, tokens, self._idle_ms, *self._bounds)
        try:
            return text(await self._scripts.run(call))
        except RedisRefused as refused:
            if refused.reason != "memory":
                raise
            return "memory"

    def _why(self, reason: str) -> str:
        turns, tokens, nbytes, pool = self._bounds
        return {
            "taken": "it was taken or forgotten, and takes no further turns",
            "turns": f"it has {turns} turns, and takes no more",
            "tokens": f"its prompts and outputs would have more than {tokens} tokens together",
            "bytes": f"it would take more than {nbytes} bytes",
            "pool": f"all sessions together would take more than {pool} bytes: take some, and forget them",
        }.get(reason, "Redis is at its memory limit")


def _prefix_digests(ids: npt.NDArray[np.int32], ends: Iterable[int]) -> dict[int, str]:
    """For each of these lengths the digest of the first so many ids. Reads the ids once."""
    data, running, at = memoryview(ids.astype("<i4").tobytes()), blake2b(digest_size=16), 0
    found: dict[int, str] = {}
    for end in sorted({*ends}):
        running.update(data[4 * at : 4 * end])
        at, found[end] = end, running.copy().hexdigest()
    return found


def _turns(begins: list[Any], frames: list[Any]) -> list[RolloutResult]:
    """The turns, with whole prompts. Raises MessageError for what nobody recorded."""
    turns, every, tokens = list[RolloutResult](), list[npt.NDArray[np.int32]](), 0
    for number, (begin, frame) in enumerate(zip(begins, frames, strict=True)):
        result = decode(frame, RolloutResult)
        if result.prompt_ids is None or result.logprobs is None:
            raise MalformedMessage(f"turn {number} has no prompt, or no log-probabilities")
        before = result.prompt_ids[:0]
        if begin:
            said = _BEGINS.fullmatch(begin)
            if said is None or int(said[1]) >= number or int(said[2]) > len(every[int(said[1])]):
                raise MalformedMessage(f"turn {number} begins with {begin[:40]!r}, which is no part of an earlier turn")
            before = every[int(said[1])][: int(said[2])]
        length = len(before) + len(result.prompt_ids)
        tokens += length + len(result.token_ids)
        if length > MAX_TOKENS or tokens > MAX_SESSION_TOKENS:
            raise MalformedMessage(f"turn {number} has {length} tokens of prompt, all have {tokens}: too many")
        ids = np.concatenate([before, result.prompt_ids, result.token_ids])
        ids.setflags(write=False)
        every.append(ids)
        turns.append(result.model_copy(update={"prompt_ids": ids[:length]}))
    return turns


def _session(tenant: str, session: str, turn_key: str = "-") -> str:
    """The session's place in the keys. Raises InvalidField for a name that cannot be one."""
    given = (("tenant", tenant, _TENANT), ("session", session, _NAME), ("turn_key", turn_key, _NAME))
    for field, name, pattern in given:
        if not re.fullmatch(pattern, name):
            raise InvalidField(field, name, f"characters of this kind, and so many: {pattern}")
    return f"{tenant}/{session}"
