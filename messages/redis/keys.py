"""Every Redis key name, in one place.

All keys of a pool carry the same hash tag `{pool}`, so a pool lives in one slot of a Redis Cluster and one script may
touch several of its keys. The Lua scripts build per-job, per-worker and per-client names from `prefix` the same way.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..errors import InvalidField
from ..model import PRIORITIES

ID_LENGTH = 32


def id_in(member: bytes) -> bytes:
    """The job id in a member of `queues` or `later`."""
    return member[-ID_LENGTH:]


def later_member(turn: int, job_id: str) -> str:
    """The member of `later` of a job with this turn."""
    return f"{turn:015d}:{job_id}"


_POOL = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class _Key:
    """A key that is named like the attribute."""

    def __set_name__(self, _: type, name: str) -> None:
        self._name = name

    def __get__(self, keys: Keys, _: type) -> str:
        return f"{keys.prefix}{self._name}"


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

    @property
    def queues(self) -> tuple[str, ...]:
        """ZSET per priority class, highest class first: job id -> its turn. The lowest goes first; see lib_jobs.lua."""
        return tuple(f"{self.prefix}queued:{index}" for index in range(len(PRIORITIES)))

    @property
    def turns(self) -> tuple[str, ...]:
        """ZSET per priority class: tenant -> the turn of its next job, as far as it is still to come."""
        return tuple(f"{self.prefix}turns:{index}" for index in range(len(PRIORITIES)))

    @property
    def later(self) -> tuple[str, ...]:
        """ZSET, per priority class, of jobs that wait for newer weights, for an adapter, for a preferred worker, or
        for one whose engine can do more (see claim.lua). A member is <turn, 15 digits>:<job id>; see `id_in`.

        Score: the version that the job needs. For an adapter, its number in the pool times 2^40 is added. If the job
        waits for the worker it prefers, the score is minus that worker's number in the pool.
        """
        return tuple(f"{self.prefix}later:{index}" for index in range(len(PRIORITIES)))

    prefers = _Key()
    """ZSET job id -> time of the pool's clock until which the job, in `later`, waits for the worker that it prefers."""
    suspects = _Key()
    """LIST of job ids on their last chance. Each of them runs alone."""
    ward = _Key()
    """STRING with a TTL, <ms>@<worker id>: the worker that runs suspects, until then by the pool's clock."""

    def job(self, job_id: str) -> str:
        """HASH, the record of a job: payload, state, owner, attempt, published samples, partials."""
        return f"{self.prefix}job:{job_id}"

    def held(self, worker_id: str) -> str:
        """SET of the job ids a worker holds."""
        return f"{self.prefix}held:{worker_id}"

    def client(self, client_id: str) -> str:
        """SET of the ids of a client's open jobs."""
        return f"{self.prefix}client:{client_id}"

    def worker(self, worker_id: str) -> str:
        """HASH of a worker's encoded status and its last claim."""
        return f"{self.prefix}worker:{worker_id}"

    def reply(self, client_id: str) -> str:
        """STREAM of results for one client. Entries stay until the client has taken them."""
        return f"{self.prefix}reply:{client_id}"

    def reader(self, client_id: str) -> str:
        """STREAM of one entry (with a TTL): whoever opened the client last. Only that one reads the reply stream."""
        return f"{self.prefix}reader:{client_id}"

    def news(self, client_id: str) -> str:
        """STREAM (bounded, with a TTL) of the samples of streamed jobs that have a new piece in their job's record."""
        return f"{self.prefix}news:{client_id}"

    def version(self, version: int | str) -> str:
        """HASH of one weights version in the ledger; an adapter's versions are <name>@<number>."""
        return f"{self.prefix}version:{version}"

    def epoch(self, epoch: int) -> str:
        """HASH of one weight transfer: announcement, reports."""
        return f"{self.prefix}epoch:{epoch}"

    def command(self, command_id: str) -> str:
        """HASH of a command, until its deadline: the command, and which of its workers have taken it."""
        return f"{self.prefix}command:{command_id}"

    def answers(self, command_id: str) -> str:
        """HASH worker id -> its answer to a command."""
        return f"{self.prefix}answers:{command_id}"

    def aside(self, name: str) -> str:
        """What had that name (without the prefix) and was in the way: of a wrong type, or a full stream. With a TTL."""
        return f"{self.prefix}aside:{name}"

    workers = _Key()
    """ZSET worker id -> lease end, by the pool's clock."""
    deadlines = _Key()
    """ZSET job id -> deadline, by the pool's clock."""
    clock = _Key()
    """HASH, the pool's clock in milliseconds: what was witnessed of it and what nobody watched. See lib_base.lua."""
    load = _Key()
    """HASH of counters: jobs and bytes open now, unread bytes, turns owed to lower classes, totals; and of the newest
    submission that was refused: `busy`, <ms by Redis' clock> <why> <client>."""
    unread = _Key()
    """HASH client id -> bytes of results on its reply stream."""
    takers = _Key()
    """HASH worker id -> what it holds and may take, as its last claim said. See lib_spread.lua."""
    wake = _Key()
    """LIST of tokens, no more than workers or new jobs: there is work for a worker that blocks on it."""

    def token(self, worker_id: str) -> str:
        """LIST with at most one token: there is work that only this worker takes, or all of its `kin_of`."""
        return f"{self.prefix}token:{worker_id}"

    needs = _Key()
    """HASH of what workers can do and until when their leases last, and of the slots of jobs that wait for some of
    them. See claim.lua."""

    bell = _Key()
    """STREAM (bounded) that announces changes: weights, cancellations, controls. See Ring."""
    dead = _Key()
    """STREAM of dead letters."""
    letters = _Key()
    """ZSET '<entry id> <bytes>' of each dead letter -> the id's time. `load` has the sum of the bytes."""
    scaler = _Key()
    """STRING with a TTL: the process that scales the pool, so that no second one does."""
    starting = _Key()
    """HASH with a TTL: a worker that starts, <host>-<pid> -> when it began and when it last said so, in ms by Redis'
    clock. "" -> how many ms the last start took, from there until the worker was in the pool."""
    mark = _Key()
    """STRING with a TTL, written before WAIT; see scripts/runner.py."""
    weights = _Key()
    """HASH: newest committed version and its tensors' digest, last epoch, the epoch under way.

    By adapter: its newest committed version, and its number in the pool.
    """
    holders = _Key()
    """HASH worker id, or "" for the trainer -> JSON of where it offers the newest committed version to others."""
    transfers = _Key()
    """STREAM (bounded) of workers' reports of transfers. Only senders listen to it."""
