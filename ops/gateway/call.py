"""What one HTTP request asks for: its body, whose it is, and the names that it gives its session and itself."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson
from starlette.requests import Request as Http

from ...messages.errors import InvalidField
from ..http import Refused
from .quotas import Admission
from .requests import Request
from .tenants import Tenant, Tenants

T = TypeVar("T")
SESSION_HEADERS = ("x-session-id", "x-smg-routing-key")
RETRIES = "x-stainless-retry-count"
"""OpenAI's clients say there how often they have sent a request before."""
MAX_KEY = 256


class ClientGone(Exception):
    """Whoever asked has hung up."""


@dataclass(slots=True)
class Call:
    """session: as a path, a header or the body names it. key: what the client calls its request, None if nothing.

    repeat: whether the client says that it has sent this before. request: as others know it, if they are to.
    about: how its answer is shown. most: tokens that it can cost; admission: that it may. watch: raises when nobody can
    answer it any more. leave: ends what is streamed.
    """

    http: Http
    raw: bytes
    body: dict[str, Any]
    tenant: Tenant
    session: str | None
    key: str | None
    repeat: bool
    request: Request | None = None
    about: bytes = b""
    most: int = 0
    admission: Admission | None = None
    watch: Callable[[], Coroutine[Any, Any, None]] | None = None
    leave: Callable[[], None] | None = None

    @property
    def kept(self) -> bool:
        """Whether what comes of it is kept for others: a client that asks again, or a trainer."""
        return self.key is not None or self.session is not None

    def settle(self, used: int | None) -> None:
        """It has ended, and cost so many tokens; None for the most that it could."""
        if self.admission is not None:
            self.admission.settle(used)

    @property
    def digest(self) -> bytes:
        """Of what is asked for: the same for a request that is sent again."""
        return hashlib.sha256(f"{self.http.url.path}\n{self.session}\n".encode() + self.raw).digest()

    async def unless_gone(self, work: Coroutine[Any, Any, T]) -> T:
        """What `work` returns. It is cancelled, and ClientGone raised, as soon as the client hangs up."""
        task, beside = asyncio.ensure_future(work), [asyncio.ensure_future(self._gone())]
        beside += [asyncio.ensure_future(self.watch())] if self.watch is not None else []
        try:
            await asyncio.wait({task, *beside}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                next(one for one in beside if one.done()).result()
            return await task
        finally:
            for one in beside:
                one.cancel()
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def _gone(self) -> None:
        while (await self.http.receive())["type"] != "http.disconnect":
            pass
        raise ClientGone


async def read_call(http: Http, tenants: Tenants, defaults: Mapping[str, Any]) -> Call:
    """Read a request with a JSON object as its body. Raises InvalidField, and Refused for what is no JSON.

    defaults: fields that the body may leave out.
    """
    tenant = tenants.of(http.scope["headers"])
    http.state.tenant = tenant.name
    raw = await http.body()
    body = dict(defaults) | _parsed(raw)
    session = http.path_params.get("session") or next(
        (http.headers[it] for it in SESSION_HEADERS if it in http.headers), None
    )
    said = body.get("session_id")
    if session is None and isinstance(said, str | int) and not isinstance(said, bool):
        session = str(said)
    elif session is None and said is not None:
        raise InvalidField("session_id", said, "a text or a number: one session a request")
    key = http.headers.get("idempotency-key") or body.get("request_id") or body.get("rid")
    if isinstance(key, list):  # of a batch, each prompt's own: nobody can ask for one of them again
        key = None
    if key is not None and (not isinstance(key, str) or len(key) > MAX_KEY):
        raise InvalidField("request_id", key, f"a text of at most {MAX_KEY} characters")
    return Call(http, raw, body, tenant, session, key, http.headers.get(RETRIES, "0").strip() not in {"", "0"})


async def body_of(http: Http) -> dict[str, Any]:
    """A body that may be left out: a JSON object, or {}. Raises Refused for what is no JSON."""
    return _parsed(raw) if (raw := await http.body()).strip() else {}


def _parsed(raw: bytes) -> dict[str, Any]:
    try:
        body = orjson.loads(raw)
    except ValueError as error:
        raise Refused(400, "invalid_json", f"the body is no JSON: {error}") from None
    if not isinstance(body, dict):
        raise Refused(400, "invalid_json", f"the body is a JSON {type(body).__name__}: an object is expected")
    return body
