"""What trainers ask of a server that they take for theirs alone: done to their own requests, adapters and pool only."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ...messages.errors import InvalidField, RolloutMQError, WaitTimeout, WeightSyncError
from ...messages.redis import text
from ...producer.control import PoolControl
from ..http import Refused
from .gateway import Gateway
from .pool_gateway import PoolGateway
from .requests import id_of
from .tenants import Tenant
from .weights import Weights, below

log = logging.getLogger(__name__)
END_S = 30.0
"""A request that was told to end has, after so many seconds; or its worker is gone, and another one ends it."""
LOOK_S = 0.2
MODES = ("abort", "wait", "keep", "in_place", "retract")
MAX_IDS = 10_000


@dataclass(frozen=True, slots=True)
class Load:
    """How a pool is doing, for one tenant: running and waiting are its own jobs, the rest is of all workers.

    used: tokens that samples have generated which run. capacity: tokens of all KV caches. slots: samples that workers
    take at once. rate: tokens per second.
    """

    running: int
    waiting: int
    used: int
    capacity: int
    slots: int
    rate: float


class Control:
    """The control of a tenant's first pool. Every method raises Refused and RedisError."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway

    async def pool(self, tenant: Tenant) -> PoolGateway:
        """The one that control is about."""
        return await self.gateway.of(tenant)

    # --- requests --------------------------------------------------------------------------------------------------

    async def abort(self, tenant: Tenant, keys: Any = None) -> int:
        """End a tenant's requests with these keys, or all of them, with what they have; returns how many jobs.

        Through whatever gateway they came. An unknown key is no error. Raises InvalidField.
        """
        if keys is not None and (
            not isinstance(keys, list) or len(keys) > MAX_IDS or not all(isinstance(it, str) for it in keys)
        ):
            raise InvalidField("request_ids", keys, f"a list of at most {MAX_IDS} texts")
        return sum([await self._abort(pool, tenant, keys) for pool in await self.gateway.pools_of(tenant)])

    async def _abort(self, pool: PoolGateway, tenant: Tenant, keys: Sequence[str] | None) -> int:
        if keys is None:
            ids = [job_id for jobs in await self._open(pool, tenant) for job_id in jobs]
        else:
            found = [await pool.requests.look(tenant.name, id_of(key)) for key in keys]
            ids = [job_id for one in found if one is not None and one.state == "running" for job_id in one.job_ids]
        if not ids:
            return 0
        with contextlib.suppress(WaitTimeout):  # whoever claims them next ends them
            await (await pool.core.member(tenant.name)).core.stop(ids, END_S)
        return len(ids)

    async def _open(self, pool: PoolGateway, tenant: Tenant) -> list[dict[str, str]]:
        """The open jobs of all of a tenant's clients."""
        clients = await pool.requests.redis.hgetall(pool.requests.keys.gateways)
        names = [text(it) for it in clients if text(it).startswith(f"{tenant.name}/")]
        return [await pool.broker.open_jobs(name) for name in names]

    async def pause(self, tenant: Tenant, mode: Any) -> None:
        """Have a tenant's new requests wait. mode: "abort" ends what runs, "wait" waits for it; else it goes on.

        Nothing has to stop for new weights: they change between two tokens, and answers say at which.
        """
        if mode not in MODES:
            raise InvalidField("mode", mode, f"one of {', '.join(MODES)}")
        pool = await self.pool(tenant)
        await pool.pauses.set(tenant.name, True)
        if mode == "abort":
            await self.abort(tenant)
        while mode == "wait":
            if not any(await self._open(pool, tenant)):
                return
            await asyncio.sleep(LOOK_S)

    async def resume(self, tenant: Tenant) -> None:
        """Publish what weights were received, and have the tenant's requests go on."""
        pool = await self.pool(tenant)
        if self.gateway.owns(tenant):
            await self.end(tenant)
        await pool.pauses.set(tenant.name, False)

    async def load(self, tenant: Tenant) -> Load:
        """How its first pool is doing."""
        pool = await self.pool(tenant)
        reading = await pool.facts.read()
        ids = [job_id for jobs in await self._open(pool, tenant) for job_id in jobs]
        states = list((await pool.broker.states(ids)).values()) if ids else []
        return Load(
            running=states.count("r"),
            waiting=states.count("q"),
            used=sum(it.unfinished_tokens for it in reading.alive),
            capacity=sum(it.kv_tokens for it in reading.alive),
            slots=sum(it.max_running for it in reading.alive),
            rate=sum(it.tokens_per_s for it in reading.alive),
        )

    async def flush(self, tenant: Tenant) -> dict[str, Any]:
        """Drop cached prefixes; the answer. In a shared pool they stay, which the answer says.

        Not by a status: slime, miles, TRL and SkyRL flush at each update, and end where that is no 200.
        """
        if not self.gateway.owns(tenant):
            log.info("tenant %s: nothing was flushed, it shares its pool", tenant.name)
            text = "Nothing was dropped: others share this pool. Prefixes of older weights are never used."
            return {"success": True, "flushed": False, "message": text}
        await self.end(tenant)
        async with PoolControl(self.gateway.settings.redis, (await self.pool(tenant)).pool) as control:
            (await control.flush_cache()).check()
        return {"success": True, "flushed": True, "message": "All cached prefixes were dropped."}

    # --- weights ---------------------------------------------------------------------------------------------------

    async def _own(self, tenant: Tenant) -> Weights:
        self.gateway.check_owns(tenant, "New weights")
        return (await self.pool(tenant)).weights

    async def load_weights(self, tenant: Tenant, path: Any, said: Any = None) -> int:
        """Serve a folder's weights as a new version, which is returned. said: what the trainer calls it.

        Raises InvalidField.
        """
        weights = await self._own(tenant)
        source = weights.pulled.pop(path, path) if isinstance(path, str) else path
        folder = await asyncio.to_thread(below, self._root(tenant), source)
        with self._told():
            return await weights.load(folder, number(said))

    async def pull(self, tenant: Tenant, path: Any, source: str) -> None:
        """Take the weights in `source` when the trainer says that those in its servers' own folder `path` are next."""
        weights = await self._own(tenant)
        if not isinstance(path, str) or not path:
            raise InvalidField("local_checkpoint_dir", path, "the path of a folder")
        await asyncio.to_thread(below, self._root(tenant), source)
        weights.pulled = {path: source}

    async def join(self, tenant: Tenant, **group: Any) -> None:
        """Join the group in which a trainer broadcasts weights. group: as SkyRLEngine has it. Raises InvalidField."""
        await (await self._own(tenant)).join(**group)

    async def receive(self, tenant: Tenant, update: dict[str, Any], said: Any = None) -> None:
        """Receive tensors, in SkyRL's forms; `end` and `resume` serve them. Raises InvalidField, TransferTimeout."""
        await (await self._own(tenant)).receive(update, number(said))

    async def end(self, tenant: Tenant, said: Any = None) -> int:
        """Serve what weights were received; returns the newest version. said: what the trainer calls them."""
        weights = await self._own(tenant)
        with self._told():
            return await weights.end(number(said))

    async def load_adapter(self, tenant: Tenant, name: Any, path: Any) -> None:
        """Serve a folder's adapter under this name, to this tenant alone where it shares the pool.

        Raises InvalidField.
        """
        if not isinstance(name, str) or not name:
            raise InvalidField("lora_name", name, "a name")
        folder = await asyncio.to_thread(below, self._root(tenant), path)
        with self._told():
            await (await self.pool(tenant)).weights.load_adapter(self.gateway.adapter(tenant, name), folder)

    async def unload_adapter(self, tenant: Tenant, name: Any) -> None:
        """Have workers forget an adapter, unless jobs use it: then they forget it when they need the room."""
        if not isinstance(name, str) or not name:
            raise InvalidField("lora_name", name, "a name")
        with contextlib.suppress(RolloutMQError):
            await (await self.pool(tenant)).weights.unload_adapter(self.gateway.adapter(tenant, name))

    @staticmethod
    @contextlib.contextmanager
    def _told() -> Iterator[None]:
        """Weights that the pool does not take are the trainer's fault, which no other attempt mends."""
        try:
            yield
        except WeightSyncError as error:
            raise Refused(400, "weights_refused", str(error)) from error

    def _root(self, tenant: Tenant) -> Any:
        return tenant.weights_from or self.gateway.settings.weights_from


def served(version: int) -> dict[str, Any]:
    """The answer to an update: the pool's version, whatever the trainer calls it. All later answers say it, too."""
    text = f"The pool serves version {version}."
    return {"success": True, "message": text, "weight_version": str(version), "new_version": str(version)}


def number(said: Any) -> int | None:
    """A trainer's name of a version as a number; None if it is none. Raises InvalidField for what is no name."""
    if said is None:
        return None
    if isinstance(said, bool) or not isinstance(said, str | int) or len(str(said)) > 128:
        raise InvalidField("weight_version", said, "a number, or a text of at most 128 characters")
    return int(said) if str(said).isdecimal() and int(said) < 1 << 40 else None
