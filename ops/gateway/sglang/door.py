"""The routes of SGLang's server, and of its router, as trainers call them."""

from __future__ import annotations

from functools import partial
from typing import Any

from starlette.requests import Request as Http
from starlette.responses import Response
from starlette.routing import Route

from ....messages.errors import InvalidField
from ...http import Refused
from ..about import loads, model_info, server_info
from ..control import Control, number, served
from ..door import Door, as_json
from ..gateway import Gateway
from ..tenants import Tenant
from .generate import GENERATE


class SGLangDoor(Door):
    """The handlers of SGLang's API. Those of control are for the tenant that asks: see Control."""

    def __init__(self, gateway: Gateway, control: Control) -> None:
        super().__init__(gateway)
        self._control = control

    def routes(self) -> list[Route]:
        """All of them."""
        posts = {
            "/abort_request": self._abort,
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/flush_cache": self._flush,
            "/update_weights_from_disk": self._from_disk,
            "/pull_weights": self._pull,
            "/init_weights_update_group": self._join,
            "/destroy_weights_update_group": self._end,
            "/update_weights_from_distributed": self._receive,
            "/begin_weight_update": self._begin,
            "/end_weight_update": self._end,
        }
        gets = {"/flush_cache": self._flush, "/v1/loads": self._loads}
        gets |= dict.fromkeys(("/get_weight_version", "/model_info", "/get_model_info"), self._model)
        gets |= dict.fromkeys(("/server_info", "/get_server_info"), self._server)
        return [
            Route("/generate", partial(self.generate, form=GENERATE), methods=["POST", "PUT"]),
            *(self.route("POST", path, it) for path, it in posts.items()),
            *(self.route("GET", path, it) for path, it in gets.items()),
            *(Route(path, self._workers, methods=["GET"]) for path in ("/workers", "/list_workers")),
            *(Route(path, self._worker, methods=["POST"]) for path in ("/workers", "/add_worker", "/remove_worker")),
            Route("/workers/{id}", self._worker, methods=["DELETE"]),
        ]

    # --- requests --------------------------------------------------------------------------------------------------

    async def _abort(self, tenant: Tenant, body: dict[str, Any]) -> Any:
        everything, rid = body.get("abort_all"), body.get("rid")
        if everything is not True and not isinstance(rid, str):
            raise InvalidField("rid", rid, "a text, or abort_all")
        count = await self._control.abort(tenant, None if everything is True else [rid])
        return {"success": True, "aborted": count}

    async def _pause(self, tenant: Tenant, body: dict[str, Any]) -> Any:
        await self._control.pause(tenant, body.get("mode", "abort"))
        return {"message": "New requests wait.", "status": "ok"}

    async def _continue(self, tenant: Tenant, _: dict[str, Any]) -> Any:
        await self._control.resume(tenant)
        return {"message": "Requests go on.", "status": "ok"}

    async def _flush(self, tenant: Tenant, _: dict[str, Any]) -> Any:
        return await self._control.flush(tenant)

    # --- what there is ---------------------------------------------------------------------------------------------

    async def _loads(self, tenant: Tenant, _: dict[str, Any]) -> Any:
        return loads(await self._control.load(tenant))

    async def _model(self, tenant: Tenant, _: dict[str, Any]) -> Any:
        return await model_info(self._control, tenant)

    async def _server(self, tenant: Tenant, _: dict[str, Any]) -> Any:
        return await server_info(self._control, tenant)

    async def _workers(self, http: Http) -> Response:
        """One worker: the pool, under the URL by which it was asked for."""
        self.tenant(http)
        url = str(http.base_url).rstrip("/")
        worker = {"id": "pool", "url": url, "worker_type": "regular", "is_healthy": True, "load": 0}
        return as_json({"workers": [worker], "urls": [url], "total": 1})

    async def _worker(self, http: Http) -> Response:
        """A trainer's servers are this pool: there is nothing to add or remove."""
        self.tenant(http)
        return as_json({"status": "accepted", "worker_id": "pool", "message": "Workers join the pool by themselves."})

    # --- weights ---------------------------------------------------------------------------------------------------

    async def _from_disk(self, tenant: Tenant, body: dict[str, Any]) -> Any:
        if body.get("abort_all_requests") is True:
            await self._control.abort(tenant)
        try:
            version = await self._control.load_weights(tenant, body.get("model_path"), body.get("weight_version"))
        except (InvalidField, Refused) as error:
            if isinstance(error, Refused) and error.status != 400:
                raise
            return as_json({"success": False, "message": str(error), "num_paused_requests": 0}, 400)
        return served(version) | {"num_paused_requests": 0}

    async def _pull(self, tenant: Tenant, body: dict[str, Any]) -> Any:
        version = number(body.get("target_version"))
        if version is None:
            raise InvalidField("target_version", body.get("target_version"), "a number")
        source = f"{body.get('source_dir')}/weight_v{version:06d}"
        await self._control.pull(tenant, body.get("local_checkpoint_dir"), source)
        return _done(f"update_weights_from_disk will take {source}.")

    async def _join(self, tenant: Tenant, body: dict[str, Any]) -> Any:
        group = {name: body.get(name) for name in ("master_port", "rank_offset", "world_size", "group_name")}
        if isinstance(port := group["master_port"], str) and port.isdecimal():  # AReaL's
            group["master_port"] = int(port)
        where = {"master_addr": body.get("master_address"), "backend": body.get("backend", "nccl")}
        await self._control.join(tenant, **group, **where)
        return _done("This gateway takes part for all the ranks of the pool.")

    async def _receive(self, tenant: Tenant, body: dict[str, Any]) -> Any:
        if body.get("load_format") not in {None, "auto"}:
            raise InvalidField("load_format", body["load_format"], "absent: tensor by tensor, as SGLang's default is")
        if body.get("abort_all_requests") is True:
            await self._control.abort(tenant)
        update = {name: body.get(name) for name in ("names", "dtypes", "shapes")}
        await self._control.receive(tenant, update, body.get("weight_version"))
        return _done("It is served when the update ends, or generation continues.")

    async def _begin(self, tenant: Tenant, _: dict[str, Any]) -> Any:
        self.gateway.check_owns(tenant, "An update of the weights")
        return _done("What comes is served when the update ends.")

    async def _end(self, tenant: Tenant, _: dict[str, Any]) -> Any:
        return served(await self._control.end(tenant))


def _done(message: str) -> dict[str, Any]:
    return {"success": True, "message": message}
