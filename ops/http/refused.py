"""What a client of the gateway is told instead of an answer: a status, and an error in OpenAI's shape."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse

from ...messages import RolloutMQError

_KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


async def refusal(_: Any, error: Exception) -> Refused:
    """For Starlette's `exception_handlers`, of Refused and of Exception, which its own texts would answer otherwise."""
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
