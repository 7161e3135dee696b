"""What a pool's servers say of its shards. Parties with different settings must not both use the pool.

Each shard of a pool with several has a record in its `load` hash: `<shard>/<how many> <id of the pool>`. A pool with
one shard has none. The first party that opens a pool with several shards writes them, the home's first and with a `?`
until all others are written, so that another one can complete what it began.

Each server also has the addresses of all of them, in the field `servers` of the home's `load` key. So a URL that names
only some is refused where it would find nothing. Whoever knows the layout writes it where it is missing or differs.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from redis.exceptions import NoPermissionError, RedisError, ResponseError

from ..errors import LayoutMismatch
from .keys import Keys
from .raw import is_wrong_type, text, whole

FIELD, SERVERS = "layout", "servers"
SHOWN = 400
"""Characters of a pool's servers that an error shows."""
_RECORD = re.compile(r"(\d{1,3})/(\d{1,3}) ([0-9a-f]{16})( \?)?")


async def check_layout(redis: Any, pool: str, shards: Sequence[Any], clustered: bool) -> str:
    """Return the pool's id once its servers say of the shards what the URL says; "" for a pool with one shard.

    shards: a client for each shard, none if there is one only. Several shards of a server share their client.
    Raises LayoutMismatch, which names both layouts.
    """
    home = Keys(pool)
    servers = list(dict.fromkeys(shards)) if shards and not clustered else [redis]  # a cluster finds the home itself
    marks = [await _field(server, home, SERVERS) for server in servers]
    known = next(filter(None, marks), "")
    asked = f"pool {pool}{f', which is on {known[:SHOWN]!r}' if known else ''}: the URL names "
    if not shards:
        if found := await _field(redis, home):
            raise LayoutMismatch(f"{asked}one shard, and its Redis has shard {_told(found)}")
        if known:
            raise LayoutMismatch(f"{asked}one shard, and {redis.where} is not the first of these servers: name all")
        return ""
    asked += f"{len(shards)} shards"
    records = await _records(pool, shards, clustered, asked)
    if marks[0] and 0 not in records:
        raise LayoutMismatch(f"{asked}; {redis.where} is not the first of these servers: name all")
    if not records:
        for server in servers:
            await _check_unused(server, pool, asked)
    if not records or records.get(0, "").endswith("?"):
        pool_id = await _write(pool, shards, asked)
    else:
        pool_id = _agreed(pool, shards, records, asked)
    told = "; ".join(server.where for server in servers)
    for server, mark in zip(servers, marks, strict=True):
        if mark != told:
            with suppress(RedisError):  # who only reads, and a server that is full: others mark it
                await server.hset(home.load, SERVERS, told)
    return pool_id


def _agreed(pool: str, shards: Sequence[Any], records: dict[int, str], asked: str) -> str:
    """The id that all records have. Raises LayoutMismatch if there are several, or if a shard has no record."""
    ids = {found.split(" ")[1] for found in records.values()}
    if len(ids) > 1:
        raise LayoutMismatch(f"{asked}; their servers belong to several pools of that name: {', '.join(sorted(ids))}")
    pool_id = ids.pop()
    for shard, its in enumerate(shards):
        if shard not in records:
            raise LayoutMismatch(
                f"{asked}; {its.where} knows nothing of shard {shard}, and the others do. It is another server, or it "
                f"has lost its data. If so, tell it again: HSET {Keys(pool, shard).load} {FIELD} "
                f"'{record(shard, len(shards), pool_id)}'"
            )
    return pool_id


async def _records(pool: str, shards: Sequence[Any], clustered: bool, asked: str) -> dict[int, str]:
    """What is found of each shard. Raises LayoutMismatch for what lies elsewhere, and for another layout's."""
    records: dict[int, str] = {}
    for server in dict.fromkeys(shards):
        for shard, its in enumerate(shards):
            if its is not server and clustered:
                continue  # a cluster has each shard where its slot is
            if not (found := await _field(server, Keys(pool, shard))):
                continue
            if its is not server:
                raise LayoutMismatch(
                    f"{asked}, with shard {shard} at {its.where}; it is at {server.where}. Name the servers in the "
                    "order in which the pool was opened first"
                )
            _check_record(found, shard, shards, asked)
            records[shard] = found
    return records


def _check_record(found: str, shard: int, shards: Sequence[Any], asked: str) -> None:
    """Raises LayoutMismatch for the record of another shard, or of another number of them."""
    known = _RECORD.fullmatch(found)
    if known is None or (known[1], known[2]) != (str(shard), str(len(shards))):
        raise LayoutMismatch(f"{asked}; {shards[shard].where} has shard {_told(found)}")


def _told(found: str) -> str:
    known = _RECORD.fullmatch(found)
    return f"{known[1]} of {known[2]}" if known else f"{found[:80]!r}"


def record(shard: int, shards: int, pool_id: str) -> str:
    """What a shard's server has of it."""
    return f"{shard}/{shards} {pool_id}"


async def remind(redis: Any, keys: Keys, shards: int, pool_id: str) -> None:
    """Write a shard's record again where a server has lost it. Only who has used the pool all along may say so."""
    await redis.hsetnx(keys.load, FIELD, record(keys.shard, shards, pool_id))


async def _write(pool: str, shards: Sequence[Any], asked: str) -> str:
    home = Keys(pool).load
    await shards[0].hsetnx(home, FIELD, f"{record(0, len(shards), secrets.token_hex(8))} ?")
    found = await _field(shards[0], Keys(pool))  # another party's, if that came first
    _check_record(found, 0, shards, asked)
    pool_id = found.split(" ")[1]
    for shard, its in enumerate(shards[1:], 1):
        await remind(its, Keys(pool, shard), len(shards), pool_id)
    await shards[0].hset(home, FIELD, record(0, len(shards), pool_id))
    return pool_id


async def _check_unused(redis: Any, pool: str, asked: str) -> None:
    """Raises LayoutMismatch if a server is in use as the only shard."""
    keys = Keys(pool)
    jobs, unread = (whole(it) for it in await redis.hmget(keys.load, "jobs", "unread"))
    workers = int(await redis.zcard(keys.workers))
    if jobs or unread or workers:
        raise LayoutMismatch(
            f"{asked}; {redis.where} has it as one shard, with {jobs} open jobs, {unread} bytes of results and "
            f"{workers} workers: let it run empty, and stop its workers and clients, before it is spread"
        )


async def _field(redis: Any, keys: Keys, name: str = FIELD) -> str:
    try:
        return text(await redis.hget(keys.load, name))
    except NoPermissionError:
        if keys.shard:
            raise
        return ""  # a user of a pool with one shard needs no further rights than before
    except ResponseError as error:
        if not is_wrong_type(error):
            raise
        return ""
