"""Rates and budgets of tenants, over all gateways of a pool: they are counted in Redis, on the pool's first shard.

A request is charged the most that it can cost before it runs, and gets back what it did not use. So a budget is never
overshot; what a gateway that died did not settle stays charged.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass

from redis.asyncio import Redis
from redis.exceptions import RedisError

from ...messages.redis import Keys
from ...messages.scripts import Scripts, calls
from ..http import Refused
from .tenants import Tenant

log = logging.getLogger(__name__)
LEASE_S = 60.0
"""A request of a gateway that is gone counts as running for so long."""
SETTLE_S = 0.5
MOST = 10**12
"""Tokens of one request, and of a limit: Lua is exact beyond."""
_SAID = {
    "requests_per_minute": "Rate limit reached: {} requests per minute.",
    "tokens_per_minute": "Rate limit reached: {} tokens per minute, of which this request asks for up to {tokens}.",
    "tokens_per_day": "The budget of {} tokens per day is too small for the up to {tokens} tokens of this request.",
    "max_running": "{} requests of this tenant run already.",
}


@dataclass(eq=False)
class Admission:
    """A request that may run.

    Call `settle` when it has ended, with the tokens of its prompt and its answers; without them it stays charged the
    most that it could cost. Further calls change nothing.
    """

    tenant: str
    request: str
    tokens: int
    day: int
    used: int | None = None
    ended: bool = False

    def settle(self, used: int | None = None) -> None:
        """It has ended. Sends nothing: `Quotas.run` does."""
        if not self.ended:
            self.ended, self.used = True, used


class Quotas:
    """Asks and tells Redis. `run` has to run beside; whoever has no limits costs nothing."""

    def __init__(self, redis: Redis, pool: str) -> None:
        self._scripts = Scripts(redis, Keys(pool))
        self._open: set[Admission] = set()

    async def admit(self, tenant: Tenant, tokens: int) -> Admission:
        """May the tenant make a request that costs up to `tokens`? One round trip.

        Raises Refused: 429 with Retry-After where a limit is reached, 503 where Redis does not answer.
        """
        rates = (tenant.requests_per_minute or 0, tenant.tokens_per_minute or 0)
        limits = (*rates, tenant.tokens_per_day or 0, tenant.max_running or 0)
        if not any(limits):
            return Admission(tenant.name, "", tokens, 0)
        request, tokens = secrets.token_hex(8), min(tokens, MOST)
        call = calls.admit(tenant.name, request, tokens, *limits, int(LEASE_S * 1000))
        try:
            verdict, wait_ms, day = await self._scripts.run(call)
        except RedisError as error:
            log.warning("no request of %s can be counted: %s", tenant.name, error)
            text = "The pool's Redis does not answer, so this request cannot be counted."
            raise Refused(503, "service_unavailable", text, retry_after_s=5) from None
        name = verdict.decode()
        if name == "ok":
            admission = Admission(tenant.name, request, tokens, day)
            self._open.add(admission)
            return admission
        text = _SAID[name].format(getattr(tenant, name), tokens=tokens)
        code = "insufficient_quota" if name == "tokens_per_day" else "rate_limit_exceeded"
        raise Refused(429, code, text, retry_after_s=wait_ms / 1000)

    async def settle(self, *, renew: bool = False) -> None:
        """Tell Redis of what has ended, and with `renew` of what runs. Raises RedisError; it may be called again."""
        told = [one for one in self._open if renew or one.ended]
        rows: defaultdict[str, list[tuple[str, int | str, int]]] = defaultdict(list)
        for one in told:
            back = max(0, one.tokens - one.used) if one.used is not None else 0
            rows[one.tenant].append((one.request, back if one.ended else "", one.day))
        ended = {one for one in told if one.ended}
        for tenant, mine in rows.items():
            await self._scripts.run(calls.settle(tenant, int(LEASE_S * 1000), *mine))
        self._open -= ended

    async def told(self, tenant: Tenant) -> None:
        """Return when Redis knows of what has ended, for a tenant whose next request may depend on it."""
        if tenant.max_running:
            with contextlib.suppress(RedisError):  # `run` tries again
                await self.settle()

    @contextlib.asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        """Inside the block Redis hears of what ends and what runs; what has ended is told before it is left."""
        task = asyncio.create_task(self._tell())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            try:
                await self.settle()
            except RedisError as error:
                log.warning("what %d requests did not use stays charged: %s", len(self._open), error)

    async def _tell(self) -> None:
        for tick in itertools.count(1):
            await asyncio.sleep(SETTLE_S)
            try:
                await self.settle(renew=tick % int(LEASE_S / 3 / SETTLE_S) == 0)
            except RedisError as error:
                log.warning("Redis does not hear which requests have ended, and will: %s", error)
