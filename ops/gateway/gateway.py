"""A gateway: its tenants, and the pools behind it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable

from ...messages.redis import connect
from ..http import Refused
from .facts import Model
from .pool_gateway import PoolGateway
from .quotas import Quotas
from .settings import Settings
from .tenants import Tenant, Tenants

OWNER = "::"
"""Between a tenant and the name of an adapter that it has brought to a pool which it shares."""


class Gateway:
    """One gateway process.

    A tenant uses the pool of its own, if it has one, and those that all tenants share. Quotas are over all of them:
    they are counted in the first. loaded: called when a tokenizer is there, the last of what stays.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.tenants = Tenants.load(settings.keys, settings.tenant)
        self._redis = connect(settings.redis, pool=settings.pools[0])
        self.quotas = Quotas(self._redis, settings.pools[0])
        self.loaded: Callable[[], None] = lambda: None
        self.first = PoolGateway(settings, settings.pools[0], self.quotas)
        self._pools: dict[str, asyncio.Task[PoolGateway]] = {}
        self._open = contextlib.AsyncExitStack()

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """The gateway works inside the block. Raises RedisUnavailable."""
        async with contextlib.aclosing(self._redis), self.quotas.run(), self._open:
            await self.pool(self.settings.pools[0])
            yield

    async def pool(self, name: str) -> PoolGateway:
        """One of the pools; it is opened when it is first asked for. Raises RedisUnavailable."""
        task = self._pools.get(name)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = self._pools[name] = asyncio.create_task(self._opened(name))
        return await asyncio.shield(task)

    async def _opened(self, name: str) -> PoolGateway:
        is_first = name == self.first.pool
        made = self.first if is_first else PoolGateway(self.settings, name, self.quotas)
        made.loaded = self.loaded
        await self._open.enter_async_context(made.opened())
        return made

    async def pools_of(self, tenant: Tenant) -> list[PoolGateway]:
        """Those that a tenant may use, its own one first. Raises RedisUnavailable."""
        names = dict.fromkeys([*([tenant.pool] if tenant.pool is not None else []), *self.settings.pools])
        return [await self.pool(name) for name in names]

    async def of(self, tenant: Tenant) -> PoolGateway:
        """A tenant's first pool. Raises RedisUnavailable."""
        return (await self.pools_of(tenant))[0]

    async def serving(self, tenant: Tenant, model: str | None) -> tuple[PoolGateway, Model, dict[str, str]]:
        """The pool that serves a model, or an adapter, to a tenant, with its model and adapters (see `adapters`).

        Without a model its first one. Raises Refused (404), and RedisUnavailable.
        """
        found = []
        for pool in await self.pools_of(tenant):
            served, adapters = await pool.facts.model(), await self.adapters(pool, tenant)
            if model is None or {model, model.rpartition(":")[2]} & adapters.keys() or model in served.names:
                return pool, served, adapters
            found.append((pool, served, adapters))
        for one in found:
            if not one[1].path:  # no worker has said yet what it serves
                return one
        here = {name for _, served, adapters in found for name in (served.name, *adapters)} - {""}
        text = f"The model {model!r} does not exist here: {', '.join(sorted(here))}."
        raise Refused(404, "model_not_found", text, param="model")

    async def unready(self, headers: Iterable[tuple[bytes, bytes]]) -> str | None:
        """Why the pool of whoever sent these headers serves nobody; without a known key the first one."""
        try:
            pool = await self.of(self.tenants.of(headers))
        except Refused:
            pool = self.first
        return await pool.facts.unready()

    def owns(self, tenant: Tenant) -> bool:
        """Whether the first pool of a tenant is nobody else's, so that it may do with it as it likes."""
        if self.settings.keys is None:  # whoever is on this host may ask: an operator has said that weights may come
            return self.settings.weights_from is not None
        others = [it.pool for it in self.tenants.all if it.name != tenant.name]
        return tenant.pool is not None and tenant.pool not in {*others, *self.settings.pools}

    def check_owns(self, tenant: Tenant, what: str) -> None:
        """Raises Refused (403) for what would touch others of a tenant whose pool is not its own."""
        if not self.owns(tenant):
            text = (
                f"{what} would change the pool for others, who share it with you. A tenant that brings weights has a "
                "pool of its own: `pool` in the file of keys; or --weights-from, where there is no such file. Adapters "
                "may be brought to any pool."
            )
            raise Refused(403, "RouteBlocked", text)

    def adapter(self, tenant: Tenant, name: str) -> str:
        """What the tenant's first pool calls an adapter that this tenant brings."""
        return name if self.owns(tenant) else f"{tenant.name}{OWNER}{name}"

    @staticmethod
    async def adapters(pool: PoolGateway, tenant: Tenant) -> dict[str, str]:
        """The adapters that a tenant may use in a pool: as it calls them -> as the pool does."""
        own = f"{tenant.name}{OWNER}"
        found = await pool.facts.adapters()
        everybodys = {name: name for name in found if OWNER not in name}
        return everybodys | {name.removeprefix(own): name for name in found if name.startswith(own)}
