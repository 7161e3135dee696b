"""Retries, bounded in time, for a Redis that does not answer or is not ready."""

from __future__ import annotations

import asyncio
import builtins
import logging
import ssl
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from redis.asyncio.retry import Retry
from redis.backoff import EqualJitterBackoff
from redis.exceptions import (
    AskError,
    AuthenticationError,
    AuthorizationError,
    ClusterDownError,
    ConnectionError,
    ReadOnlyError,
    TimeoutError,
    TryAgainError,
)

from ..errors import NotOnDisk, NotReplicated, RedisRefused

T = TypeVar("T")
log = logging.getLogger(__name__)

REPLY_TIMEOUT_S = 5.0
# No new attempt starts this long after the first. One attempt may then be under way, so a caller learns within about
# RETRY_BUDGET_S + REPLY_TIMEOUT_S = 10 s that Redis is gone.
RETRY_BUDGET_S = 5.0
PAUSE_S = 0.2

NOT_READY = (
    ConnectionError,  # LOADING is one of these
    TimeoutError,
    ReadOnlyError,  # a primary that was just demoted: the next connection finds the new one
    ClusterDownError,  # a failover under way; MASTERDOWN is one of these
    AskError,  # MOVED and ASK: the slot is, or will be, with another node
    TryAgainError,
)
"""Errors after which another attempt on a new connection may succeed."""

_deadline: ContextVar[float | None] = ContextVar("rolloutmq_redis_deadline", default=None)
reply_within: ContextVar[float | None] = ContextVar("rolloutmq_redis_reply", default=None)
"""How long the reply of a blocking command may take, instead of the connection's own bound."""


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Inside the block no new attempt of a command starts after this many seconds. 0 allows a single attempt."""
    token = _deadline.set(asyncio.get_running_loop().time() + seconds)
    try:
        yield
    finally:
        _deadline.reset(token)


class BoundedRetry(Retry):
    """Retries with capped exponential backoff for RETRY_BUDGET_S seconds, instead of a number of attempts.

    redis-py nests its retries (a command's retry reconnects, which retries too), so counted attempts would multiply.
    Here the outermost call sets the deadline, and the nested ones keep it. Refused credentials and certificates are
    never retried. Of the other refusals only that of a primary that waits for its replicas is retried.

    It also bounds each attempt to `reply_s`, instead of redis-py's socket_timeout. With that redis-py sends through
    asyncio.wait_for, which on Python 3.11 loses a cancellation that comes just as the send completes
    (python/cpython#86296). A cancelled task in a loop would then run on.
    """

    def __init__(self, budget_s: float = RETRY_BUDGET_S, reply_s: float = REPLY_TIMEOUT_S) -> None:
        super().__init__(EqualJitterBackoff(cap=0.5, base=0.01), -1, (*NOT_READY, RedisRefused))
        self.budget_s = budget_s
        self.reply_s = reply_s

    async def _in_time(self, do: Callable[[], Awaitable[T]], limit: float) -> T:
        try:
            async with asyncio.timeout(limit):
                return await do()
        except builtins.TimeoutError as error:
            raise TimeoutError(f"no reply within {limit:g} s") from error

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
                    return await self._in_time(do, reply_within.get() or self.reply_s)
                except self._supported_errors as error:
                    # A lasting refusal is an answer like any other, so its connection stays open.
                    if (is_retryable and not is_retryable(error)) or (isinstance(error, RedisRefused) and final(error)):
                        raise
                    failures += 1
                    await (fail(error, failures) if with_failure_count else fail(error))
                    pause = self._backoff.compute(failures)
                    if final(error) or now() + pause >= deadline:
                        raise
                    await asyncio.sleep(pause)
        finally:
            _deadline.reset(token)


class Once(BoundedRetry):
    """A single attempt, bounded in time, whatever the caller's budget. It is for asking one server of several."""

    async def call_with_retry(
        self,
        do: Callable[[], Awaitable[T]],
        fail: Callable[..., Any],
        is_retryable: Callable[[Exception], bool] | None = None,
        with_failure_count: bool = False,
    ) -> T:
        try:
            return await self._in_time(do, self.reply_s)
        except self._supported_errors as error:
            await (fail(error, 1) if with_failure_count else fail(error))
            raise


async def insist(do: Callable[[], Awaitable[T]], *, over: Callable[[], bool]) -> T:
    """What `do` returns, however long Redis is away. It may be repeated, also after an error.

    Raises the error of the last attempt once `over()`, and what no other attempt can help.
    """
    while True:
        try:
            return await do()
        except (*NOT_READY, RedisRefused, NotReplicated, NotOnDisk, OSError) as error:
            if final(error) or over():
                raise
            log.warning("Redis is asked again: %s", error)
            await asyncio.sleep(PAUSE_S)


def final(error: BaseException) -> bool:
    """Whether another attempt soon cannot help: for credentials, certificates and lasting refusals."""
    if isinstance(error, RedisRefused):
        return error.reason != "replicas"
    if isinstance(error, AuthenticationError | AuthorizationError):
        return True
    # redis-py reports any OSError of a connect as its ConnectionError, with the cause beside it.
    return isinstance(error, ConnectionError) and isinstance(error.__context__, ssl.SSLCertVerificationError)
