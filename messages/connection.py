"""Connections to Redis: one way to open them, with every wait bounded.

RESP2 on purpose: replies have the same shape in every redis-py from 6.2 to 8.x, proxies that do not know HELLO work,
and no push message can ever sit between a command and its reply. Nothing here decodes: keys and values stay bytes.
"""

from __future__ import annotations

import asyncio
import builtins
import os
import re
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any, TypeVar, cast
from urllib.parse import SplitResult, parse_qs, urlsplit

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.backoff import EqualJitterBackoff
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    ConnectionError,
    NoPermissionError,
    ReadOnlyError,
    RedisError,
    TimeoutError,
)

from .errors import ConfigError, RedisUnavailable

T = TypeVar("T")

CONNECT_TIMEOUT_S = 3.0
REPLY_TIMEOUT_S = 5.0
# No new attempt is started this long after the first; with one attempt under way, a caller hears within about
# RETRY_BUDGET_S + REPLY_TIMEOUT_S = 10 s that Redis is gone.
RETRY_BUDGET_S = 5.0
# The longest BLOCK a `blocking=True` client may ask for. Longer, and its own timeout takes the server for dead.
MAX_BLOCK_S = 30.0
MAX_CONNECTIONS = 64

# What a URL's query may say. Everything else there is either unknown to redis-py, which would complain only at the
# first command, or would change what this package relies on (protocol, decode_responses, timeouts).
_QUERY = {"db", "username", "password", "client_name", "max_connections"}

_deadline: ContextVar[float | None] = ContextVar("rolloutmq_redis_deadline", default=None)


class BoundedRetry(Retry):
    """Retries with capped exponential backoff until RETRY_BUDGET_S seconds have passed, not for a number of attempts.

    redis-py nests its retries (a command's retry reconnects, which retries too), so counted attempts multiply; here the
    outermost call sets the deadline and the nested ones keep to it. Refused credentials are never retried.

    It also bounds each attempt to `reply_s`, in place of redis-py's socket_timeout: under that one redis-py sends
    through asyncio.wait_for, which on Python 3.11 loses a cancellation that comes just as the send completes
    (python/cpython#86296), and a cancelled task in a loop then runs on.
    """

    def __init__(self, budget_s: float = RETRY_BUDGET_S, reply_s: float = REPLY_TIMEOUT_S) -> None:
        # READONLY: a primary that was just demoted; the new connection finds the new one.
        super().__init__(EqualJitterBackoff(cap=0.5, base=0.01), -1, (ConnectionError, TimeoutError, ReadOnlyError))
        self.budget_s = budget_s
        self.reply_s = reply_s

    async def _in_time(self, do: Callable[[], Awaitable[T]]) -> T:
        try:
            async with asyncio.timeout(self.reply_s):
                return await do()
        except builtins.TimeoutError as error:
            raise TimeoutError(f"no reply within {self.reply_s:g} s") from error

    async def call_with_retry(
        self,
        do: Callable[[], Awaitable[T]],
        fail: Callable[..., Any],
        is_retryable: Callable[[Exception], bool] | None = None,
        with_failure_count: bool = False,
    ) -> T:
        now = asyncio.get_running_loop().time
        outer = _deadline.get()
        deadline = outer if outer is not None else now() + self.budget_s
        token = _deadline.set(deadline)
        failures = 0
        try:
            while True:
                try:
                    return await self._in_time(do)
                except self._supported_errors as error:
                    if is_retryable and not is_retryable(error):
                        raise
                    failures += 1
                    await (fail(error, failures) if with_failure_count else fail(error))
                    pause = self._backoff.compute(failures)
                    refused = isinstance(error, AuthenticationError | AuthorizationError)
                    if refused or now() + pause >= deadline:
                        raise
                    await asyncio.sleep(pause)
        finally:
            _deadline.reset(token)


def connect(url: str, *, blocking: bool = False) -> Redis:
    """A client for `redis://`, `rediss://` (TLS) or `unix://` URLs; nothing is sent before the first command.

    Commands are sent again after a connection error, so only idempotent ones may go through it (the broker's scripts
    are). Waiting for a reply, a connection or a free pooled connection is bounded; all of it ends in redis-py's
    ConnectionError or TimeoutError within about 10 s.

    `blocking=True` gives a client for blocking reads, to be used for nothing else: it waits for a reply MAX_BLOCK_S
    seconds and a bit, and never re-sends, because a re-sent XREADGROUP returns the entry *after* the one whose reply
    was lost. Its user handles the error and reads its own pending entries again. BLOCK 0 ends in a TimeoutError.
    At most MAX_CONNECTIONS such reads can wait at once.

    Raises ConfigError for a URL that cannot be used, without showing its password.
    """
    _check(url)
    pool = BlockingConnectionPool.from_url(
        url,
        protocol=2,
        decode_responses=False,
        socket_connect_timeout=CONNECT_TIMEOUT_S,
        socket_timeout=None,  # BoundedRetry does this
        # A pooled connection that idled this long is tried with a PING first: NATs and load balancers forget silently.
        health_check_interval=15,
        retry=BoundedRetry(0.0, MAX_BLOCK_S + REPLY_TIMEOUT_S) if blocking else BoundedRetry(),
        max_connections=MAX_CONNECTIONS,
        timeout=REPLY_TIMEOUT_S,  # for a free connection, when all are in use
    )
    return Redis.from_pool(pool)


def default_url() -> str:
    """Where Redis is if nobody says: $ROLLOUTMQ_REDIS, else redis://127.0.0.1:6379/0; as on the command line."""
    return os.environ.get("ROLLOUTMQ_REDIS") or "redis://127.0.0.1:6379/0"


async def ping(client: Redis) -> None:
    """Return if Redis answers; else RedisUnavailable saying which address, what happened and what to do about it."""
    where = _address(client)
    try:
        await cast("Awaitable[Any]", client.ping())
    except (AuthenticationError, AuthorizationError, NoPermissionError) as error:
        raise RedisUnavailable(
            f"Redis at {where} refused these credentials ({error}). Give user and password in the URL: "
            "redis://USER:PASSWORD@HOST:PORT/0"
        ) from error
    except (RedisError, OSError) as error:
        raise RedisUnavailable(
            f"no Redis at {where}: {error}. Is it running there, and is the port open from here? "
            "TLS servers need rediss://. `rolloutmq redis` runs one on this machine."
        ) from error


def redacted(url: str) -> str:
    """`url` as it may be logged: without the password, wherever in it that stands."""
    hidden = re.sub(r"^(\w+://[^/@:]*:).*@", r"\1***@", url, flags=re.DOTALL)
    return re.sub(r"([?&]password=)[^&]*", r"\1***", hidden)


def _check(url: str) -> None:
    if not isinstance(url, str):
        raise ConfigError(f"Redis URL must be a string such as redis://127.0.0.1:6379/0, not {type(url).__name__}")
    if why := _flaw(url):
        raise ConfigError(f"Redis URL {redacted(url)!r}: {why}")


def _flaw(url: str) -> str | None:
    """What is wrong with `url`, in words that quote no part of it where a password might stand."""
    try:
        options = parse_url(url)
    except ValueError as error:
        if "Port" in str(error):  # its text quotes what it took for a port
            return "the port must be a number up to 65535; special characters in a password need percent-encoding"
        return str(error)
    return _flaw_of_parts(urlsplit(url), options.get("path"))


def _flaw_of_parts(parts: SplitResult, socket_path: str | None) -> str | None:
    if unknown := {name for name in parse_qs(parts.query) if name not in _QUERY and not name.startswith("ssl_")}:
        return f"unknown option {', '.join(sorted(unknown))}; allowed are {', '.join(sorted(_QUERY))} and ssl_*"
    if parts.scheme == "unix":
        return None if socket_path else "the path of the socket is missing, as in unix:///run/redis.sock?db=0"
    if not parts.hostname:
        return "the host is missing, as in redis://127.0.0.1:6379/0"
    if not re.fullmatch(r"/?\d*", parts.path):
        return "after host and port only the database's number may follow, as in redis://127.0.0.1:6379/0"
    return None


def _address(client: Redis) -> str:
    options = client.connection_pool.connection_kwargs
    return options.get("path") or f"{options.get('host', 'localhost')}:{options.get('port', 6379)}"
