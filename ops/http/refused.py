"""What a client of the gateway is told instead of an answer: a status, and an error in OpenAI's shape."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from redis.exceptions import RedisError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from ...messages import RolloutMQError

_KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


async def refusal(_: Any, error: Exception) -> Refused:
    """The answer to a bug: the application's own text would be another one."""
    if isinstance(error, Refused):
        return error
    return Refused(500, "internal_error", "The gateway failed; its log says how.")


class Refused(RolloutMQError):
    """A request that is not served.

    status: of HTTP. code: for programs, as OpenAI's ("invalid_api_key"). retry_after_s: when another attempt may help.
    headers: more of them, in lower case.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param
        self.headers = dict(headers or {})
        if retry_after_s is not None:
            self.headers["retry-after"] = str(max(1, math.ceil(retry_after_s)))
        if status == 401:
            self.headers["www-authenticate"] = "Bearer"

    @property
    def kind(self) -> str:
        """The error's `type`."""
        if self.code == "insufficient_quota":
            return "insufficient_quota"
        return _KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")

    @property
    def response(self) -> JSONResponse:
        """{"error": {"message", "type", "param", "code"}}."""
        error = {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}
        return JSONResponse({"error": error}, self.status, self.headers)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """As an ASGI application: it answers every request with itself."""
        await self.response(scope, receive, send)


Told = Callable[[RolloutMQError], Refused]
"""What a client is told of one of the package's errors."""


def refused_of(error: Exception, told: Told | None = None) -> Refused:
    """What a client is told of an error. told: else the package's are the client's fault, but for a silent Redis.

    Errors that nobody raises on purpose are raised: they are bugs, and only the log has them.
    """
    if isinstance(error, Refused):
        return error
    if isinstance(error, HTTPException):
        return Refused(error.status_code, "no_such_route", str(error.detail), headers=error.headers)
    if told is not None and isinstance(error, RolloutMQError):
        return told(error)
    if isinstance(error, RedisError | OSError | TimeoutError):
        return Refused(503, "service_unavailable", "The pool's Redis does not answer.", retry_after_s=1)
    if isinstance(error, RolloutMQError):
        return Refused(400, "invalid_request", str(error))
    raise error


def error_handlers(told: Told | None = None) -> dict[Any, Any]:
    """Starlette's `exception_handlers`: each error as its answer. told: as for `refused_of`."""

    async def answered(_: Any, error: Exception) -> JSONResponse:
        return refused_of(error, told).response

    kinds = (RolloutMQError, RedisError, OSError, TimeoutError, HTTPException)
    return {**dict.fromkeys(kinds, answered), Exception: refusal}
