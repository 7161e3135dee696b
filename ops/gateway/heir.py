"""Gateways of one pool: each tells that it lives, and inherits from those that died."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Coroutine
from typing import Any

from redis.exceptions import RedisError

from ...messages.errors import ClientReplaced, InvalidField, MessageError, RolloutMQError
from ...messages.ids import check_client_id
from ...messages.model import RolloutResult
from ...messages.redis import text
from ...messages.scripts import calls
from ...producer.calls import Groups
from ...producer.core import ClientCore
from ...producer.inbox import Group
from .answers import Answer, learn
from .requests import Request, RequestLost, Requests

log = logging.getLogger(__name__)
ANYBODY = "-"
"""Stands for the heir of a client that a gateway has left to whoever comes."""


class Gateways:
    """One gateway among those of its pool. It has a client id for each of its tenants: <tenant>/<name>.

    If this gateway was silent for so long that others took it for dead, it has been inherited: what it still gets under
    its old name it can neither acknowledge, nor finish once that is begun anew. It takes a new name then.
    """

    def __init__(
        self,
        redis_url: str,
        requests: Requests,
        *,
        renamed: Callable[[list[str]], Coroutine[Any, Any, None]],
        beat_s: float = 3.0,
        alive_s: float = 15.0,
    ) -> None:
        """redis_url: of the pool of `requests`. renamed(old): run when this gateway has taken a new name, with the ids
        of the clients to be closed. beat_s: how often it says that it lives. alive_s: how long others believe it.
        """
        self._url, self._requests, self._redis = redis_url, requests, requests.redis
        self._renamed, self._beat_s, self._alive_s = renamed, beat_s, alive_s
        self._keys, self._scripts = requests.keys, requests.scripts
        self.name, self._clients = _new_name(), list[str]()
        self._silent: dict[str, float] = {}  # clients of gateways that seem dead -> since when, by time.monotonic()
        self._heirs: dict[str, asyncio.Task[None]] = {}
        self._renaming = set[asyncio.Task[None]]()
        self._beating = asyncio.Lock()  # a beat that does not know of a client yet would not come after it joined

    async def join(self, tenant: str) -> str:
        """The id for this gateway's client of a tenant; to be called before the client is opened."""
        async with self._beating:
            while (client := f"{tenant}/{self.name}") not in self._clients:
                check_client_id("client_id", client)
                await self._beat(client)
        return client

    async def leave(self) -> None:
        """Nothing more comes from this gateway. What its clients have not finished is for others, at once."""
        for task in self._heirs.values():
            task.cancel()
        await asyncio.gather(*self._heirs.values(), *self._renaming, return_exceptions=True)
        for client, heir in (*((it, "") for it in self._clients), *((it, self.name) for it in self._heirs)):
            await self._scripts.run(calls.leave_gateway(client, heir, ANYBODY))
        await self._redis.delete(self._keys.gateway(self.name))

    async def run(self) -> None:
        """Say that this gateway lives, and look for dead ones, until this is cancelled."""
        while True:
            try:
                async with self._beating:
                    await self._beat()
                await self._look()
            except (RedisError, OSError) as error:
                log.warning("gateway %s cannot say that it lives: %s", self.name, error)
            await asyncio.sleep(self._beat_s)

    async def _beat(self, joins: str = "") -> None:
        clients = [*self._clients, *([joins] if joins else [])]
        beat = calls.beat_gateway(self.name, int(self._alive_s * 1000), joins, *clients)
        if text(await self._scripts.run(beat)) != "inherited":
            self._clients = clients
            return
        log.warning("gateway %s was silent for so long that others inherited from it: it takes a new name", self.name)
        for task in self._heirs.values():
            task.cancel()
        old, self._clients, self.name = self._clients, [], _new_name()
        task = asyncio.create_task(self._renamed(old))  # it may wait for somebody who joins
        self._renaming.add(task)
        task.add_done_callback(self._renaming.discard)

    async def _look(self) -> None:
        """Inherit from the clients of dead gateways.

        One is dead if it was silent at two looks, some beats apart: when Redis' clock steps forward, all are silent
        until they beat again.
        """
        self._heirs = {client: task for client, task in self._heirs.items() if not task.done()}
        found = {text(client): text(heir) for client, heir in (await self._redis.hgetall(self._keys.gateways)).items()}
        keepers = {client: heir or client.rpartition("/")[2] for client, heir in found.items()}
        dead = {it for it in {*keepers.values()} if not await self._redis.exists(self._keys.gateway(it))}
        now, silent = time.monotonic(), dict[str, float]()
        for client, keeper in keepers.items():
            if client in self._heirs or client in self._clients or (keeper not in dead and keeper != self.name):
                continue
            silent[client] = self._silent.get(client, now)
            sure = keeper in {ANYBODY, self.name} or now - silent[client] >= 2 * self._beat_s
            if sure and text(await self._scripts.run(calls.inherit_gateway(client, self.name))) == "ok":
                self._heirs[client] = asyncio.create_task(self._inherit(client, self.name))
        self._silent = silent

    async def _inherit(self, dead: str, name: str) -> None:
        """Finish what a dead gateway's client has left, and cancel what nobody can ask for."""
        log.warning("gateway %s inherits from %s", name, dead)
        try:
            with contextlib.suppress(InvalidField):  # no client has such a name
                await self._take_over(
                    ClientCore(self._url, self._keys.pool, client_id=dead, max_outstanding=0, caps=None)
                )
            await self._scripts.run(calls.leave_gateway(dead, name, ""))
        except ClientReplaced:
            log.info("another gateway inherits from %s: this one was silent", dead)
        except Exception:  # the next look begins again
            log.exception("gateway %s cannot inherit from %s yet", name, dead)

    async def _take_over(self, core: ClientCore) -> None:
        try:
            await core.open()
            for group_id in {job.group_id for job in core.inbox.open()}:
                request, jobs = await self._request(core.client_id, group_id), core.inbox.group_jobs(group_id)
                if request is None or not {*request.job_ids} <= {*jobs}:  # the others were never accepted
                    await core.cancel(jobs)
            async for group in Groups(core, None):
                await self._settle(core.client_id, group)
        finally:
            await core.close()

    async def _settle(self, dead: str, group: Group) -> None:
        request = await self._request(dead, group.group_id)
        answer = None if request is None else _answer(request, group)
        if request is None or answer is None:
            return
        try:
            await self._requests.finish(request, answer)
        except RequestLost:
            log.info("request %s was forgotten before it was finished", request.id)
        except (
            RolloutMQError
        ) as refused:  # kept for whoever asks; else the request is lost with its client, and begun anew
            if isinstance(refused, RedisError):
                raise
            log.warning("request %s is not recorded: %s", request.id, refused)

    async def _request(self, dead: str, group: str) -> Request | None:
        """The request with a key that this group of jobs belongs to, if it is this client's to finish."""
        try:
            request = await self._requests.look(dead.partition("/")[0], group)
        except MessageError as error:
            log.warning("request %s: its answer cannot be read: %s", group, error)
            return None
        return request if request is not None and request.state == "running" and request.owner == dead else None


def _answer(request: Request, group: Group) -> Answer | None:
    """What came of a request; None if that is not all of it."""
    jobs: dict[str, list[RolloutResult]] = {job_id: [] for job_id in request.job_ids}
    if {it.job_id for it in group.results} | {it.job_id for it in group.failures} != jobs.keys():
        return None
    if group.failures:
        return group.failures[0]
    for result in group.results:
        jobs[result.job_id].append(result)
    for results, prompt in zip(jobs.values(), request.prompts, strict=True):
        learn(results, prompt)
    return [[*its] for its in jobs.values()] if all(len(its) == its[0].n for its in jobs.values()) else None


def _new_name() -> str:
    # Scripts know a gateway's clients by it: what these are refused is no dead letter.
    return f"gw-{secrets.token_hex(8)}"
