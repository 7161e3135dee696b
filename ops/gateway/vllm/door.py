"""The routes that vLLM's servers, prime-rl's and SkyRL's have beside OpenAI's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from starlette.responses import Response
from starlette.routing import Route

from ....messages.errors import InvalidField
from ....producer.control import PoolControl
from ....sync.transfer import Ledger
from ..about import metrics
from ..control import Control, served
from ..door import Door, Handler
from ..gateway import Gateway
from ..tenants import Tenant
from .generate import GENERATE


class VLLMDoor(Door):
    """The handlers of vLLM's API. Those of control are for the tenant that asks: see Control."""

    def __init__(self, gateway: Gateway, control: Control) -> None:
        super().__init__(gateway)
        self._control = control
        self._receivers: dict[str, Any] = {}

    def routes(self) -> list[Route]:
        """All of them."""
        posts: dict[str, Handler] = {
            "/pause": self._pause,
            "/resume": self._resume,
            "/sleep": partial(self._memory, asleep=True),
            "/wake_up": partial(self._memory, asleep=False),
            "/reset_prefix_cache": self._reset,
            "/init_weight_transfer_engine": self._join,
            "/shutdown_weight_transfer_engine": self._leave,
            "/start_weight_update": self._start,
            "/update_weights": self._update,
            "/collective_rpc": self._call,
        }
        posts |= dict.fromkeys(("/abort_requests", "/inference/v1/abort_requests"), self._abort)
        posts |= {f"{place}/load_lora_adapter": self._load_adapter for place in ("", "/v1", "/skyrl/v1")}
        posts |= {f"{place}/unload_lora_adapter": self._unload_adapter for place in ("", "/v1")}
        posts |= dict.fromkeys(("/weight_checker", "/weights_checker"), self._check)
        posts |= dict.fromkeys(("/finish_weight_update", "/update_weight_version"), self._finish)
        gets = {"/is_paused": self._is_paused, "/get_world_size": self._world_size}
        gets |= {"/weight_info": self._version, "/metrics": self._metrics}
        generate = partial(self.generate, form=GENERATE)
        return [
            *(Route(f"{place}/v1/generate", generate, methods=["POST"]) for place in ("/inference", "/skyrl")),
            *(self.route("POST", path, it) for path, it in posts.items()),
            *(self.route("GET", path, it) for path, it in gets.items()),
        ]

    # --- requests --------------------------------------------------------------------------------------------------

    async def _pause(self, tenant: Tenant, body: dict[str, Any]) -> Any:
        await self._control.pause(tenant, body.get("mode", "abort"))
        return {"status": "paused"}

    async def _resume(self, tenant: Tenant, _: dict[str, Any]) -> Any:
        await self._control.resume(tenant)
        return {"status": "resumed"}

    async def _is_paused(self, tenant: Tenant, _: dict[str, Any]) -> Any:
        pool = await self._control.pool(tenant)
        return {"is_paused": await pool.pauses.paused(tenant.name)}

    async def _abort(self, tenant: Tenant, body: dict[str, Any]) -> Any:
        return {"status": "aborted", "aborted": await self._control.abort(tenant, body.get("request_ids") or None)}

    async def _reset(self, tenant: Tenant, _: dict[str, Any]) -> Any:
        return await self._control.flush(tenant)

    async def _memory(self, tenant: Tenant, body: dict[str, Any], *, asleep: bool) -> Any:
        """Have the workers of a tenant's own pool give up memory, or take it again."""
        self.gateway.check_owns(tenant, "Sleep")
        said: Any = body.get("tags") or []
        tags: Any = said.split(",") if isinstance(said, str) else said
        pool = await self._control.pool(tenant)
        async with PoolControl(self.gateway.settings.redis, pool.pool) as control:
            (await (control.sleep(tags) if asleep else control.wake(tags))).check()
        return {"status": "asleep" if asleep else "awake"}

    # --- what there is ---------------------------------------------------------------------------------------------

    async def _world_size(self, tenant: Tenant, _: dict[str, Any]) -> Any:
        """One rank, the gateway's, takes part in a broadcast: the pool has its own way from there."""
        return {"world_size": 1}

    async def _version(self, tenant: Tenant, _: dict[str, Any]) -> Any:
        pool = await self._control.pool(tenant)
        return {"weight_version": str((await pool.facts.read(0.0)).committed)}

    async def _check(self, tenant: Tenant, _: dict[str, Any]) -> Any:
        """The digest of what is served: no worker serves a version of which a tensor's digest did not match."""
        pool = await self._control.pool(tenant)
        version = (await pool.facts.read(0.0)).committed
        digest = await Ledger(pool.requests.redis, pool.pool).digest_of(version)
        said = {"success": True, "message": "Every worker has compared all digests before it served this version."}
        return said | {"weight_version": str(version), "checksum": digest}

    async def _metrics(self, tenant: Tenant, _: dict[str, Any]) -> Response:
        pool = await self._control.pool(tenant)
        text = metrics(await self._control.load(tenant), (await pool.facts.model()).name)
        return Response(text, media_type="text/plain; version=0.0.4")

    # --- weights ---------------------------------------------------------------------------------------------------

    async def _load_adapter(self, tenant: Tenant, body: dict[str, Any]) -> Any:
        name = body.get("lora_name")
        await self._control.load_adapter(tenant, name, body.get("lora_path"))
        said = {"status": "success", "success": True, "message": f"Adapter {name} is served."}
        return said | {"lora_name": name, "lora_int_id": 1, "loaded_adapters": {name: body["lora_path"]}}

    async def _unload_adapter(self, tenant: Tenant, body: dict[str, Any]) -> Any:
        await self._control.unload_adapter(tenant, body.get("lora_name"))
        return {"status": "success", "success": True, "message": "Jobs that use it still end with it."}

    async def _update(self, tenant: Tenant, body: dict[str, Any]) -> Any:
        """prime-rl's form: a folder. vLLM's: what is broadcast next."""
        if "update_info" in body:
            for info in body["update_info"] if isinstance(body["update_info"], list) else [body["update_info"]]:
                await self._receive(tenant, info)
            return {"success": True, "message": "Weights updated"}
        if body.get("weight_dir") is None:
            raise InvalidField("weight_dir", None, "a folder: use the transport filesystem")
        return {"status": "success"} | served(await self._control.load_weights(tenant, body["weight_dir"]))

    # --- broadcasts ------------------------------------------------------------------------------------------------

    async def _join(self, tenant: Tenant, body: dict[str, Any]) -> Any:
        """Join the trainer's group, in the place of one that this tenant's trainer has left."""
        self.gateway.check_owns(tenant, "New weights")
        await (await self._control.pool(tenant)).weights.engine()  # it says where there is no torch
        from .receiver import Receiver, read_init  # noqa: PLC0415 – torch

        info = read_init(body.get("init_info"))
        device = self.gateway.settings.receiver_device
        self._receivers[tenant.name] = await self._blocking(Receiver, info, device)
        return {"success": True, "message": "Weight transfer initialized"}

    async def _leave(self, tenant: Tenant, _: dict[str, Any]) -> Any:
        self._receivers.pop(tenant.name, None)
        return {"success": True, "message": "Weight transfer ended"}

    async def _start(self, tenant: Tenant, _: dict[str, Any]) -> Any:
        self.gateway.check_owns(tenant, "New weights")
        return {"success": True, "message": "Weights that come are served when the update is finished."}

    async def _receive(self, tenant: Tenant, info: Any) -> None:
        self.gateway.check_owns(tenant, "New weights")
        if (receiver := self._receivers.get(tenant.name)) is None:
            raise InvalidField("update_info", "", "sent after /init_weight_transfer_engine, to the same gateway")
        await self._control.receive(tenant, await self._blocking(receiver.receive, info))

    async def _blocking(self, call: Callable[..., Any], *given: Any) -> Any:
        """A trainer that does not come keeps no other work waiting, nor the end of this process."""
        from ....sync.wire import begin  # noqa: PLC0415 – torch

        return await asyncio.shield(asyncio.wrap_future(begin(partial(call, *given))))

    async def _finish(self, tenant: Tenant, body: dict[str, Any]) -> Any:
        said = body.get("weight_version", body.get("new_version"))
        if body.get("abort_all_requests") is True:
            await self._control.abort(tenant)
        return served(await self._control.end(tenant, said))

    async def _call(self, tenant: Tenant, body: dict[str, Any]) -> Any:
        """SkyRL's methods."""
        methods = {"skyrl_start_weight_update": self._start, "update_weights_nccl": self._update}
        methods |= {"skyrl_finish_weight_update": self._finish}
        if (method := methods.get(str(body.get("method")))) is None:
            raise InvalidField("method", body.get("method"), f"one of {', '.join(methods)}")
        kwargs = body.get("kwargs") or {}
        if not isinstance(kwargs, dict):
            raise InvalidField("kwargs", kwargs, "an object")
        await method(tenant, kwargs)
        return {"results": [None]}
