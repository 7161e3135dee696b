"""Every Redis key, in one place: its name, what it is, how long it stays and what it holds.

All keys of a pool carry the same hash tag `{pool}`, so a pool lives in one slot of a Redis Cluster and one script may
touch several of its keys. The Lua scripts say `KEY.<attribute>` for them, the audit checks them. docs/redis.md has a
table of them, made of the docstrings here and in fields.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Generic, Literal, TypeVar, cast

from ..errors import InvalidField
from . import fields
from .fields import CLASSES, ENTRY, JOB, SESSION

T = TypeVar("T")
_POOL = re.compile(r"[A-Za-z0-9_.-]{1,64}")
Life = Literal["fixed", "ttl", "worker", "job", "client"]
"""fixed: one of a few names, may stay. ttl: must expire. worker: belongs to a registered worker. job: of a job
or a recorded session, open, or expires. client: exists only while it names open jobs."""


def later_member(turn: int, job_id: str) -> str:
    """The member of `later` of a job with this turn."""
    return f"{turn:015d}:{job_id}"


class Key(Generic[T]):
    """A kind of key, named like the attribute unless `name` says otherwise.

    type: as Redis' TYPE says it; "" for what a script has set aside because it was of a wrong type. index: its members
    are ids of jobs. of: whose it is, which follows the name; CLASSES of them where it is a priority class.
    """

    def __init__(self, type: str, life: Life = "fixed", of: str = "", *, name: str = "", index: bool = False) -> None:
        self.type, self.life, self.of, self.index = type, life, of, index
        self.attribute, self._name = "", name

    def __set_name__(self, _: type, attribute: str) -> None:
        self.attribute = attribute

    @property
    def name(self) -> str:
        """Without the pool's prefix, and without whose it is."""
        return (self._name or self.attribute) + (":" if self.of else "")

    @property
    def names(self) -> tuple[str, ...]:
        """Of its keys, without the pool's prefix. One that ends with ":" is the beginning of many."""
        return tuple(f"{self.name}{number}" for number in range(CLASSES)) if self.of == CLASS else (self.name,)

    def __get__(self, keys: Keys, _: type) -> T:
        start = keys.prefix + self.name
        if not self.of:
            return cast("T", start)
        if self.of == CLASS:
            return cast("T", tuple(keys.prefix + name for name in self.names))
        return cast("T", lambda of: f"{start}{of}")


CLASS = "class"
One = Key[str]
Each = Key[Callable[[object], str]]
Classes = Key[tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Keys:
    """The key names of one pool, or of one of its shards. The first shard has the names of a pool with one shard.

    Raises InvalidField for a pool name that could not be a hash tag.
    """

    pool: str
    shard: int = 0

    def __post_init__(self) -> None:
        if not _POOL.fullmatch(self.pool):
            raise InvalidField("pool", self.pool, "1 to 64 letters, digits, '_', '.', '-'")

    @property
    def prefix(self) -> str:
        """Start of every key of the pool's shard. No pool has such a name as further shards have: it contains a ':'."""
        return f"rmq:{{{self.pool}:{self.shard}}}:" if self.shard else f"rmq:{{{self.pool}}}:"

    job = Each("hash", "job", "job id")
    """The record of a job: see the next table"""
    queues = Classes("zset", "fixed", CLASS, name="queued", index=True)
    """Queued jobs -> their turns, the lowest goes first"""
    turns = Classes("zset", "fixed", CLASS)
    """Tenants -> turn of the next job, as far as it is still to come"""
    later = Classes("zset", "fixed", CLASS, index=True)
    """Jobs that wait for newer weights, an adapter, a preferred worker or an engine that can do more, as `<turn, 15
    digits>:<job id>` -> the version that it needs; 2^40 times an adapter's number, plus the version; 2^52 plus 2^32
    times a slot of `needs`, plus tokens of context; or minus the preferred worker's number;
    or, for exactly one version, minus 2^40 and that"""
    prefers = One("zset", index=True)
    """Jobs in `later` -> until when they wait for a preferred worker"""
    suspects = One("list")
    """Jobs on their last chance; each runs alone"""
    ward = One("string", "ttl")
    """`<ms>@<worker id>`: who runs suspects, until then"""
    deadlines = One("zset", index=True)
    """Jobs -> deadlines"""
    held = Each("set", "worker", "worker id", index=True)
    """Jobs that it holds"""
    client = Each("set", "client", "client id", index=True)
    """Its open jobs"""
    reply = Each("stream", "ttl", "client id")
    """Results, until the client has taken them: see its table"""
    reader = Each("stream", "ttl", "client id")
    """One entry: who opened the client last. Only that one reads `reply`"""
    news = Each("stream", "ttl", "client id")
    """Samples of streamed jobs with a new piece; bounded"""
    unread = One("hash")
    """Client id -> bytes of its results"""
    sessions = One("zset")
    """Recorded sessions -> when they are forgotten if no turn comes, in ms of the pool's clock"""
    session = Each("hash", "job", "tenant/session")
    """A recorded session: see the last table"""
    workers = One("zset")
    """Worker id -> end of its lease"""
    worker = Each("hash", "worker", "worker id")
    """Its status, encoded, its last claim, the suspect it runs alone, its number for `later`"""
    takers = One("hash")
    """Worker id -> what it holds and may take, as its last claim said (`lib_spread.lua`)"""
    needs = One("hash")
    """What workers can do -> end of the last such lease; what jobs wait for -> number of its slot (`lib_needs.lua`)"""
    wake = One("list", "ttl")
    """Tokens, no more than workers or new jobs, for workers that block on it"""
    token = Each("list", "ttl", "worker id")
    """At most one token: work for this worker, or for all that can do the same"""
    clock = One("hash")
    """The pool's clock, in ms (`lib_base.lua`)"""
    load = One("hash")
    """Counters, and what is there once: turns, shares, the layout of shards, the newest refusal (`busy`)"""
    bell = One("stream")
    """Announces changes: weights, cancellations, moves, commands; bounded"""
    command = Each("hash", "ttl", "command id")
    """A command, encoded (`m`), until its deadline, and which of its workers (`w:<worker id>`) have taken it"""
    answers = Each("hash", "ttl", "command id")
    """Worker id -> its answer"""
    dead = One("stream")
    """Dead letters"""
    letters = One("zset")
    """`<entry id> <bytes>` of each dead letter -> its time"""
    weights = One("hash")
    """Newest committed version, its digest, the newest announced one, the last transfer and the one under way; of an
    adapter its newest versions, where it is offered, and its number"""
    version = Each("hash", "ttl", "version")
    """Its state (`st`) and when it changed; an adapter's versions are `<name>@<number>`"""
    epoch = Each("hash", "ttl", "transfer")
    """State (`st`), announcement (`m`), and reports by worker"""
    holders = One("hash")
    """Worker id, or nothing for the trainer -> where it offers the committed version, as JSON"""
    transfers = One("stream")
    """Workers' reports of transfers, for senders; bounded"""
    scaler = One("string", "ttl")
    """The process that scales the pool"""
    starting = One("hash", "ttl")
    """`<host>-<pid>` of a worker that starts -> when it began and last said so; nothing -> ms of the last start"""
    request = Each("hash", "ttl", "tenant/request")
    """A request with a key: digest of its body, the gateway's client that runs it, what its job ids come from, its
    prompts; then its answer"""
    answered = One("zset")
    """`<tenant>/<request> <bytes>` of each answer that is kept -> when it is forgotten"""
    gateways = One("hash")
    """Client id of a gateway -> the gateway that inherits from it; nothing while it lives, `-` if whoever comes may"""
    gateway = Each("string", "ttl", "gateway")
    """It lives"""
    spent = Each("hash", "ttl", "tenant")
    """What a gateway's tenant owes to its rates (`requests`, `tokens`; as of `at`), and the tokens of a day"""
    admitted = Each("zset", "ttl", "tenant")
    """Its requests that run -> until when they count as running"""
    paused = One("hash")
    """Tenants of a gateway that have paused: their new requests wait"""
    mark = One("string", "ttl")
    """Written before WAIT"""
    aside = Each("", "ttl", "name")
    """What had that name and was in the way: of a wrong type, or a full stream"""


KEYS: tuple[Key[object], ...] = tuple(key for key in vars(Keys).values() if isinstance(key, Key))


@cache
def script_words() -> dict[str, str]:
    """The scripts' words for what is in Redis (`KEY.workers`, `JOB.state`, `SLOT`), and what stands for each in a text.

    A key with a part of its own (`KEY.job`, `KEY.queues`) is the text before that part.
    """
    words = {f"KEY.{key.attribute}": f"prefix .. '{key.name}'" for key in KEYS}
    for record in (JOB, ENTRY, SESSION):
        words |= {f"{record.__name__}.{name}": f"'{it}'" for name, it in vars(record).items() if name[0] != "_"}
    words |= {f"AT.{name}": str(place) for place, name in enumerate(fields.CLAIMED, 1)}
    words["AT.all"] = ", ".join(words[f"JOB.{name}"] for name in fields.CLAIMED)
    return words | {name: str(getattr(fields, name)) for name in fields.NUMBERS}
