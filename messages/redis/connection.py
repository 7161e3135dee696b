"""Connections to Redis: one way to open them, with every wait bounded.

They use RESP2. Replies then have the same shape in every redis-py from 6.2 to 8.x, proxies without HELLO work, and no
push message can come between a command and its reply. Nothing is decoded: keys and values stay bytes.
"""

from __future__ import annotations

import asyncio
import builtins
import os
import time
from collections.abc import Awaitable
from contextlib import nullcontext
from typing import Any, cast

from redis.asyncio import BlockingConnectionPool, Redis
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    ConnectionError,
    NoPermissionError,
    RedisError,
    TimeoutError,
)

from ..defaults import DEFAULT_URL
from ..errors import ConfigError, RedisRefused, RedisUnavailable, WrongLoop, WrongProcess
from .answers import FULL, SILENT, said, told_as_ours
from .disk import how_to_flush
from .keys import Keys
from .layout import check_layout
from .retry import REPLY_TIMEOUT_S, BoundedRetry, reply_within, within
from .shards import parse_shards
from .topology import link
from .url import Durability, Target, redacted

CONNECT_TIMEOUT_S = 3.0
ONCE_S = 2.0
"""A person at a terminal waits so long for the first answer of a single server. The nodes of a cluster, and Sentinels,
are asked one after the other, so their attempt is only bounded by its parts."""
# The longest BLOCK of a `blocking=True` client. During a longer one its own timeout would take the server for dead.
MAX_BLOCK_S = 30.0
MAX_CONNECTIONS = 64
IDLE_S = 10.0
"""Seconds after which a connection that nobody uses may be closed."""


class PoolRedis(Redis):
    """redis-py's client with the URL's settings for the pool's Redis.

    It raises RedisUnavailable if Redis is gone or not ready, and RedisRefused if Redis refuses a write. Both are
    RedisErrors. Pipelines raise redis-py's own ConnectionError or TimeoutError.

    where: the address as text for people. durability: see url.Durability. clustered: whether the pool's slot can move.
    blocks: whether it is for blocking reads, see `connect`.
    single: whether the URL names one server, so that no others are asked where it is.
    pool: whose Redis it is, None if nobody said. pool_id: which pool of that name, once `ping` has asked.
    shards: of a pool with several, a client for each; the first is this one. Closing this one closes all.
    """

    where = "an unknown address"
    durability = Durability()
    clustered = False
    blocks = False
    single = False
    pool: str | None = None
    pool_id = ""
    shards: tuple[PoolRedis, ...] = ()

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        reply_s = _reply_within(args) or (MAX_BLOCK_S + REPLY_TIMEOUT_S if self.blocks else None)
        token = reply_within.set(reply_s)
        try:
            with told_as_ours(self.where), within(0.0) if self.blocks else nullcontext():
                return await super().execute_command(*args, **options)  # type: ignore[no-untyped-call]
        finally:
            reply_within.reset(token)

    def reader(self, reads: int) -> PoolRedis:
        """A client for up to `reads` blocking reads at a time, as `connect(blocking=True)` returns, over the same
        connections. It is closed with this one."""
        first = self._reader(reads)
        first.shards = (first, *(one._reader(reads) for one in self.shards[1:])) if self.shards else ()
        return first

    def _reader(self, reads: int) -> PoolRedis:
        self.connection_pool.max_connections += reads
        reader = PoolRedis(connection_pool=self.connection_pool)
        reader.where, reader.durability, reader.clustered = self.where, self.durability, self.clustered
        reader.blocks = True
        return reader

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        for one in dict.fromkeys(self.shards[1:]):
            if one is not self:
                await one.aclose(close_connection_pool)
        await super().aclose(close_connection_pool)


class OwnPool(BlockingConnectionPool):
    """A connection pool of one process and one event loop. Raises WrongProcess in a forked child, which shares the
    sockets, and WrongLoop on another loop while connections of the first one are open.

    When all connections are in use, a call waits for one as long as it takes: each call that has one is bounded itself.
    If Redis answers none of them, nobody waits for the next turn; this is looked at every `timeout` seconds.

    Whenever a connection comes back to it, it closes those that nobody has used for IDLE_S seconds: a server has room
    for a limited number.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._pid = os.getpid()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._unused: dict[Any, float] = {}  # when each connection came back last, the longest ago first
        self._answered = self._failed = 0  # connections that came back open, and closed after a failure

    async def get_connection(self, *args: Any, **options: Any) -> Any:
        if os.getpid() != self._pid:
            raise WrongProcess("the connection to Redis", self._pid)
        if self._loop is not (running := asyncio.get_running_loop()):
            if self._loop is not None and any(
                it.is_connected for it in (*self._available_connections, *self._in_use_connections)
            ):
                raise WrongLoop("the connection to Redis", self._loop.is_closed())
            self._loop = running
        answered, failed = self._answered, self._failed
        while True:
            try:
                return await super().get_connection(*args, **options)  # type: ignore[no-untyped-call]
            except ConnectionError as error:
                if not isinstance(error.__cause__, builtins.TimeoutError):  # not the wait for a free connection
                    raise
                if self._failed > failed and self._answered == answered:
                    raise ConnectionError(f"none of {self.max_connections} earlier calls was answered") from None

    async def release(self, connection: Any) -> None:
        self._answered += connection.is_connected
        self._failed += not connection.is_connected
        await super().release(connection)
        now = time.monotonic()
        self._unused.pop(connection, None)
        self._unused[connection] = now
        for unused, since in list(self._unused.items()):
            if now - since < IDLE_S:
                break
            del self._unused[unused]
            if unused in self._available_connections:
                await unused.disconnect(nowait=True)  # it awaits nothing: nobody gets the connection meanwhile


def connect(url: str, *, pool: str | None = None, blocking: bool = False) -> PoolRedis:
    """A client for any of these URLs. It sends nothing before the first command. docs/redis.md explains each form.

        redis://[USER:PASSWORD@]HOST[:PORT][/DB]       rediss://… the same through TLS       unix:///PATH[?db=0]
        redis+sentinel://[USER:PASSWORD@]HOST[:PORT],…/SERVICE[/DB]       the primary that these sentinels know
        redis+cluster://[USER:PASSWORD@]HOST[:PORT],…       the node of this cluster that has the slot of `pool`
        rediss+sentinel://…, rediss+cluster://…       the same, everything through TLS
        URL,URL,…[?shards=N]       a pool over several of these servers, see shards.py

    The client sends a command again after a connection error, and when Redis is not ready (it loads, was demoted, a
    failover is under way, the slot has moved). So send only idempotent commands, as the broker's scripts are. Every
    wait for a reply or a connection is bounded. RedisUnavailable comes within about 10 s. Of more than MAX_CONNECTIONS
    calls at once the others wait for their turn.

    `blocking=True` returns a client for blocking reads only. It waits for a reply as long as the command says (at most
    MAX_BLOCK_S seconds) and a little longer. It never re-sends, because a re-sent XREADGROUP returns the entry *after*
    the one whose reply was lost. The caller handles the error and reads its own pending entries again. BLOCK 0 ends in
    an error too. At most MAX_CONNECTIONS such reads can wait at once.

    Raises ConfigError for a URL that cannot be used, without showing its password. Every command raises WrongProcess in
    a forked child, and WrongLoop on another event loop than the one before.
    """
    shards = parse_shards(url)
    if pool is None and (shards.count > 1 or shards.targets[0].kind == "cluster"):
        raise ConfigError(f"Redis URL {redacted(url)!r}: connect() has to be told the pool, whose slot one node has")
    if shards.count == 1:
        return _client(shards.targets[0], pool, 0, blocking)
    clustered = shards.targets[0].kind == "cluster"
    servers = shards.count if clustered else len(shards.targets)
    clients = [_client(shards.target(number), pool, number, blocking) for number in range(servers)]
    clients[0].shards = tuple(clients[shard % servers] for shard in range(shards.count))
    return clients[0]


def _client(target: Target, pool: str | None, shard: int, blocking: bool) -> PoolRedis:
    settings: dict[str, Any] = {
        "max_connections": MAX_CONNECTIONS,
        **target.options,
        **link(target, None if pool is None else Keys(pool, shard)),
        "protocol": 2,
        "decode_responses": False,
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
        "socket_timeout": None,  # BoundedRetry does this
        # A connection that was idle this long is tested with PING, because NATs and load balancers drop it silently.
        "health_check_interval": 15,
        "retry": BoundedRetry(),
        "timeout": REPLY_TIMEOUT_S,  # see OwnPool
    }
    client = cast("PoolRedis", PoolRedis.from_pool(OwnPool(**settings)))
    client.where, client.durability, client.clustered = target.where, target.durability, target.kind == "cluster"
    client.blocks = blocking
    client.single, client.pool = target.kind == "single", pool
    return client


def default_url() -> str:
    """The default URL: $ROLLOUTMQ_REDIS, or else redis://127.0.0.1:6379/0. The command line has the same default."""
    return os.environ.get("ROLLOUTMQ_REDIS") or DEFAULT_URL


async def ping(client: Redis, *, once: bool = False) -> None:
    """Return if Redis answers, and all of it for a pool with shards, whose layout is compared with the URL's.

    Raises RedisUnavailable, which says the address, what happened and what to do, or LayoutMismatch.

    once: make a single attempt, of ONCE_S seconds at most, for a person at a terminal. Otherwise try for RETRY_BUDGET_S
    seconds.
    Raises RedisRefused if the URL has durable=disk and the server cannot promise that.
    """
    if not isinstance(client, PoolRedis) or client.pool is None:
        await _ping(client, once)
        return
    for server in dict.fromkeys(client.shards or (client,)):
        await _ping(server, once)
    client.pool_id = await check_layout(client, client.pool, client.shards, client.clustered)


async def _ping(client: Redis, once: bool) -> None:
    where = getattr(client, "where", "its address")
    try:
        with within(0.0) if once else nullcontext():
            async with asyncio.timeout(ONCE_S if once and getattr(client, "single", False) else None):
                await cast("Awaitable[Any]", client.ping())
            if getattr(client, "durability", Durability()).disk:
                await how_to_flush(client)
    except (AuthenticationError, AuthorizationError, NoPermissionError) as error:
        raise RedisUnavailable(
            f"Redis at {where} refused these credentials ({error}). Give user and password in the URL: "
            "redis://USER:PASSWORD@HOST:PORT/0"
        ) from error
    except RedisRefused as refused:  # it answers, and commands that write nothing work
        if refused.reason == "durable":
            raise RedisRefused(f"Redis at {where}: {refused}", "durable") from None
    except (RedisError, OSError) as error:
        cause = error.__cause__ if isinstance(error.__cause__, RedisError) else error
        if FULL in str(cause):
            raise
        what = f"no answer within {ONCE_S:g} s" if isinstance(cause, builtins.TimeoutError) else said(cause).rstrip(".")
        if isinstance(cause, TimeoutError | builtins.TimeoutError):
            advice = f"{SILENT}. --redis URL or ROLLOUTMQ_REDIS names another one"
        else:
            advice = (
                "Start one with `rolloutmq redis`, or say where one is: --redis URL or ROLLOUTMQ_REDIS "
                "(rediss:// where it wants TLS)"
            )
        raise RedisUnavailable(f"no Redis at {where}: {what}. {advice}.") from error


def _reply_within(args: tuple[Any, ...]) -> float | None:
    """Seconds that the reply to a blocking command may take. None for other commands, and for endless blocking."""
    name = str(args[0]).upper()
    if name in {"XREAD", "XREADGROUP"}:
        at = next((i for i, word in enumerate(args) if word in (b"BLOCK", "BLOCK")), None)
        block_s = float(args[at + 1]) / 1000 if at is not None else 0.0
    elif name in {"BLPOP", "BRPOP"}:
        block_s = float(args[-1])
    else:
        return None
    return min(block_s, MAX_BLOCK_S) + REPLY_TIMEOUT_S if block_s > 0 else None
