"""Requests with a key: each gets one answer, however often and through whichever gateway it comes."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast

from redis.exceptions import RedisError, ResponseError

from ...messages.errors import InvalidField, MessageError, PoolBusy, RolloutMQError, TurnRefused
from ...messages.ids import derived_id, is_id, new_id
from ...messages.model import JobFailure, TokenIds
from ...messages.redis import Keys, PoolRedis, is_wrong_type, name_once, text
from ...messages.scripts import Scripts, calls
from .answers import LATER, MAX_JOBS, Answer, Results, pack, pack_prompts, refusal_of, unpack, unpack_prompts

log = logging.getLogger(__name__)
RUNS_S = 31 * 86400
"""A request that has no answer is forgotten after so long: no job's deadline is later."""
ANSWERS_BYTES = 1 << 30
T = TypeVar("T")
State = Literal["new", "running", "done"]
FIRST_PAUSE_S, PAUSE_S = 0.01, 0.5


class KeyReused(InvalidField):
    """A key belongs to a request with another body."""


class RequestLost(RolloutMQError):
    """A request is not known any more: it was forgotten, or its gateway died before all of its jobs were accepted.

    Whoever has its body may begin it again.
    """


@dataclass(frozen=True, slots=True)
class Request:
    """A request with a key, as it was found.

    state: "new": the caller is to run it; "running": a gateway does; "done": `answer` is there.
    id: 32 hex digits, from its key. owner: the client of the gateway that runs it. seed: tells it from an earlier or
    later one under the same key. prompts: of each of its jobs, (p,) int32, or None where the worker makes the tokens.
    about: how its answer is shown, as whoever began it wrote that.
    """

    tenant: str
    id: str
    state: State
    owner: str
    seed: str
    prompts: tuple[TokenIds | None, ...] = (None,)
    answer: Answer | None = None
    about: bytes = b""

    @property
    def job_ids(self) -> list[str]:
        """The ids that its jobs have, whoever submits them."""
        seeds = (hashlib.sha256(f"{self.seed}:{place}".encode()).digest() for place in range(len(self.prompts)))
        return [derived_id(int(self.seed[:12], 16), seed) for seed in seeds]

    @property
    def _place(self) -> str:
        return f"{self.tenant}/{self.id}"


Record = Callable[[Request, Results], Awaitable[None]]
"""Gets the results of a request before it is finished, perhaps more than once. Raises TurnRefused."""


class Requests:
    """The requests with keys of one pool. Their records are in the home shard.

    A gateway begins a request. If it is new, the gateway submits its jobs under `job_ids`, with `id` as their group. It
    finishes the request before it acknowledges their results (`before_ack`), and answers with what `finish` returns. So
    whoever inherits from it finds what it has not finished. It drops a request that gets no jobs.
    """

    def __init__(
        self,
        redis: PoolRedis,
        pool: str,
        *,
        record: Record | None = None,
        remember_s: float = 600.0,
        most_bytes: int = ANSWERS_BYTES,
    ) -> None:
        """remember_s: how long an answer is kept. most_bytes: of all kept answers, with which no request begins."""
        self.redis: Any = redis
        self.keys = Keys(pool)
        self.scripts = Scripts(redis, self.keys)
        self._record, self._remember_s, self._most_bytes = record, remember_s, most_bytes
        self._unfinished = set[str]()  # seeds of what was begun here

    async def begin(
        self,
        tenant: str,
        key: str,
        digest: bytes,
        owner: str,
        *,
        prompts: Sequence[TokenIds | None] = (None,),
        only_new: bool = False,
        about: bytes = b"",
    ) -> Request:
        """Begin the request with this key, or find it.

        digest: of its body. owner: the caller's client id. prompts: of each of its jobs, see Request; the heir of a
        gateway has no other place to learn them from. only_new: if the key is taken, take another one that nobody
        knows. Raises KeyReused, PoolBusy if too many answers are kept, and MessageError for an answer that cannot be
        read.
        """
        if not 0 < len(prompts) <= MAX_JOBS:
            raise InvalidField("prompts", len(prompts), f"1 to {MAX_JOBS} jobs of a request")
        name, seed = id_of(key), new_id()
        where, packed = f"{tenant}/{name}", pack_prompts(prompts)
        begin = calls.begin_request(where, digest, owner, seed, packed, self._most_bytes, RUNS_S * 1000, about)
        found = await self.scripts.run(begin)
        state = text(found[0])
        if state == "full":
            kept = f"answers that are kept hold {found[1]} bytes, at most {self._most_bytes}"
            raise PoolBusy(f"pool {self.keys.pool}: {kept}: later there is room again", [], "answers")
        if only_new and state != "new":
            return await self.begin(tenant, secrets.token_hex(16), digest, owner, prompts=prompts, about=about)
        if state == "other":
            raise KeyReused("key", key, "the key of one request: a request with another body needs another key")
        if state == "new":
            self._unfinished.add(seed)
        answer = unpack(found[3]) if state == "done" else None
        return Request(tenant, name, cast("State", state), text(found[2]), text(found[1]), tuple(prompts), answer)

    async def finish(self, request: Request, answer: Answer) -> Answer:
        """Record the answer, keep it, and return the one that counts: the first.

        A turn that its session does not take is kept as a failure, which whoever asks again is told, too. Raises
        TurnRefused then, and RequestLost.
        """
        try:
            if self._record is not None and not isinstance(answer, JobFailure):
                await self._record(request, cast(Results, answer))
        except RolloutMQError as refused:
            if isinstance(refused, RedisError) or (isinstance(refused, TurnRefused) and refused.reason in LATER):
                raise  # another attempt may be recorded
            await self._store(request, refusal_of(request.job_ids[0], refused))
            raise
        return await self._store(request, answer)

    async def _store(self, request: Request, answer: Answer) -> Answer:
        try:
            packed = pack(answer, request.prompts)
        except InvalidField as refused:  # it is for the caller alone
            log.warning("request %s: its answer is not kept: %s", request.id, refused)
            cause = "its answer was too large to be kept for a repeat"
            packed = pack(JobFailure(job_id=request.job_ids[0], outcome="dead", cause=cause, error=str(refused)))
        state, *other = await self._finish(request, packed, max(1, int(self._remember_s * 1000)))
        if state == b"lost":
            raise _lost(request)
        return unpack(other[0]) if other else answer

    def unfinished(self, request: Request) -> bool:
        """Whether it was begun here, and has no answer yet."""
        return request.seed in self._unfinished

    async def drop(self, request: Request) -> None:
        """Forget the request, and its answer: nobody will ask for it, or it has no jobs any more.

        Does nothing if others took the owner for dead: they finish it; or have, while its owner did not.
        """
        await self._finish(request, b"", -1 if self.unfinished(request) else 0)

    async def _finish(self, request: Request, packed: bytes, keep_ms: int) -> list[bytes]:
        found: list[bytes] = await self.scripts.run(calls.finish_request(request._place, request.seed, packed, keep_ms))
        if found[0] != b"lost":
            self._unfinished.discard(request.seed)
        return found

    async def look(self, tenant: str, id: str) -> Request | None:
        """The request as it is now; None if nobody knows it. Raises MessageError for an answer that cannot be read."""
        if not is_id(id):
            return None
        names = ("owner", "seed", "answer", "prompts", "about")
        owner, seed, answer, prompts, about = await self._read(f"{tenant}/{id}", *names)
        if not is_id(text(seed)):
            return None
        if answer is not None:
            return Request(tenant, id, "done", text(owner), text(seed), (), unpack(answer), about or b"")
        try:
            given = unpack_prompts(prompts or b"")
            return Request(tenant, id, "running", text(owner), text(seed), given, about=about or b"")
        except MessageError as error:
            name_once(f"request {tenant}/{id}: {error}")
            return None

    async def wait(self, request: Request, timeout: float) -> Answer | None:
        """The answer, once it is there; None after `timeout` seconds. Raises RequestLost, and what `look` raises."""
        deadline, pause = time.monotonic() + timeout, FIRST_PAUSE_S
        while True:
            # Asked first: an heir finishes a request before it takes the owner's name away.
            owned = await lenient(self.redis.hexists(self.keys.gateways, request.owner), True)
            seed, answer = await self._read(request._place, "seed", "answer")
            if text(seed) != request.seed or (answer is None and not owned):
                raise _lost(request)
            if answer is not None:
                return unpack(answer)
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            await asyncio.sleep(min(pause, left))
            pause = min(PAUSE_S, 1.5 * pause)

    async def _read(self, place: str, *names: str) -> list[bytes | None]:
        return await lenient(self.redis.hmget(self.keys.request(place), names), [None] * len(names))


def id_of(key: str) -> str:
    """The id of the request with this key."""
    return hashlib.sha256(key.encode(errors="surrogatepass")).hexdigest()[:32]


async def lenient(asked: Awaitable[T], instead: T) -> T:
    """What Redis answers; `instead` if the key holds something of another type."""
    try:
        return await asked
    except ResponseError as error:
        if is_wrong_type(error):
            return instead
        raise


def _lost(request: Request) -> RequestLost:
    return RequestLost(
        f"request {request.id} is not known any more: it was forgotten, or its gateway died before its jobs were "
        "accepted. Send it again"
    )
