"""The routes that vLLM's servers, prime-rl's and SkyRL's have beside OpenAI's."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from starlette.requests import Request as Http
from starlette.responses import Response
from starlette.routing import Route

from ....messages.errors import InvalidField
from ....producer.control import PoolControl
from ....sync.transfer import Ledger
from ...http import Refused
from ..about import metrics
from ..call import body_of
from ..control import Control
from ..door import Door, as_json
from ..gateway import Gateway
from ..tenants import Tenant
from .generate import GENERATE

Handler = Callable[[Tenant, dict[str, Any]], Awaitable[Any]]


class VLLMDoor(Door):
    """The handlers of vLLM's API. Those of control are for the tenant that asks: see Control."""

    def __init__(self, gateway: Gateway, control: Control) -> None:
        super().__init__(gateway)
        self._control = control

    def routes(self) -> list[Route]:
        """All of them. What a query says counts as said in the body."""
        posts: dict[str, Handler] = {
            "/pause": self._pause,
            "/resume": self._resume,
            "/sleep": partial(self._memory, asleep=True),
            "/wake_up": partial(self._memory, asleep=False),
            "/reset_prefix_cache": self._reset,
            "/abort_requests": self._abort,
            "/inference/v1/abort_requests": self._abort,
            "/load_lora_adapter": self._load_adapter,
            "/v1/load_lora_adapter": self._load_adapter,
            "/skyrl/v1/load_lora_adapter": self._load_adapter,
            "/unload_lora_adapter": self._unload_adapter,
            "/v1/unload_lora_adapter": self._unload_adapter,
            "/weight_checker": self._check,
            "/weights_checker": self._check,
            "/update_weights": self._update,
        }
        gets: dict[str, Handler] = {
            "/is_paused": self._is_paused,
            "/get_world_size": self._world_size,
            "/weight_info": self._version,
        }
        generate = partial(self.generate, form=GENERATE)
        return [
            Route("/inference/v1/generate", generate, methods=["POST"]),
            Route("/skyrl/v1/generate", generate, methods=["POST"]),
            *(Route(path, partial(self._do, handler=it), methods=["POST"]) for path, it in posts.items()),
            *(Route(path, partial(self._do, handler=it), methods=["GET"]) for path, it in gets.items()),
            Route("/metrics", self._metrics, methods=["GET"]),
        ]

    async def _do(self, http: Http, handler: Handler) -> Response:
        tenant = self.tenant(http)
        body = await body_of(http) if http.method == "POST" else {}
        return as_json(await handler(tenant, dict(http.query_params) | body))

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
        await self._control.flush(tenant)
        return {"success": True}

    async def _memory(self, tenant: Tenant, body: dict[str, Any], *, asleep: bool) -> Any:
        """Have the workers of a tenant's own pool give up memory, or take it again."""
        self.gateway.check_owns(tenant, "Sleep")
        tags = body.get("tags") or []
        tags = tags.split(",") if isinstance(tags, str) else tags
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

    async def _metrics(self, http: Http) -> Response:
        tenant = self.tenant(http)
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
            raise Refused(501, "no_broadcast", "This gateway receives no broadcasts: it takes weights from folders.")
        if body.get("weight_dir") is None:
            raise InvalidField("weight_dir", None, "a folder: use the transport filesystem")
        version = await self._control.load_weights(tenant, body["weight_dir"])
        return {"status": "success", "success": True, "weight_version": str(version)}
