"""Errors as clients of OpenAI and SkyRL expect them: dictionaries whose `code` is the HTTP status."""

from __future__ import annotations

from typing import Any

from ...messages.errors import (
    ClientBusy,
    FeatureUnavailable,
    InvalidField,
    JobFailed,
    PoolBusy,
    RedisRefused,
    RedisUnavailable,
    RolloutMQError,
    WaitTimeout,
)
from ...messages.model import JobFailure

BAD_REQUEST, TIMEOUT, TOO_MANY, INTERNAL, UNAVAILABLE, GATEWAY_TIMEOUT = 400, 408, 429, 500, 503, 504


def error_dict(message: str, code: int, kind: str, param: str | None = None) -> dict[str, Any]:
    """{"error": {"message", "type", "param", "code"}}. code: the HTTP status, a number."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


_KINDS: tuple[tuple[type[RolloutMQError], int, str], ...] = (
    (FeatureUnavailable, BAD_REQUEST, "unsupported_by_pool"),
    (InvalidField, BAD_REQUEST, "invalid_request_error"),
    (WaitTimeout, GATEWAY_TIMEOUT, "timeout_error"),
    (PoolBusy, TOO_MANY, "rate_limit_error"),
    (ClientBusy, TOO_MANY, "rate_limit_error"),
    (RedisUnavailable, UNAVAILABLE, "service_unavailable_error"),
    (RedisRefused, UNAVAILABLE, "service_unavailable_error"),
    (RolloutMQError, INTERNAL, "server_error"),
)


_REFUSALS: dict[str, tuple[int, str, str | None]] = {
    "no_key": (401, "authentication_error", "invalid_api_key"),
    "route_blocked": (403, "RouteBlocked", None),
    "no_model": (404, "invalid_request_error", "model_not_found"),
    "not_found": (404, "not_found_error", None),
    "method": (405, "invalid_request_error", None),
    "session_closed": (409, "conflict_error", "session_closed"),
    "too_large": (413, "request_too_large", None),
    "key_reused": (422, "idempotency_error", "idempotency_key_reused"),
    "rate": (429, "rate_limit_error", "rate_limit_exceeded"),
    "no_engine": (503, "EngineUnavailable", None),
}
"""Why a request never becomes a job -> HTTP status, type, and OpenAI's own code if there is one."""


def refusal(why: str, message: str, param: str | None = None) -> tuple[int, dict[str, Any]]:
    """The HTTP status and the body that refuse a request. why: a name of the table above."""
    status, kind, code = _REFUSALS[why]
    error = {"message": message, "type": kind, "param": param, "code": code or status}
    return status, {"error": error | ({"retryable": True} if why == "no_engine" else {})}


def version_not_ready(target: int, applied: int | None, message: str) -> tuple[int, dict[str, Any]]:
    """The status and body of miles' contract for a request whose weights version no worker has. applied: the newest."""
    return 409, {"type": "WeightVersionNotReady", "target_version": target, "applied": applied, "message": message}


def error_of(error: RolloutMQError) -> dict[str, Any]:
    """The answer to a request that ended in this error."""
    if isinstance(error, JobFailed):
        return _of_failure(error)
    param = error.field if isinstance(error, InvalidField) else None
    code, kind = next((code, kind) for cls, code, kind in _KINDS if isinstance(error, cls))
    return error_dict(str(error), code, kind, param or None)


def _of_failure(error: JobFailed) -> dict[str, Any]:
    failure = error.failure
    text = str(error)
    if isinstance(failure, JobFailure):
        if failure.outcome == "expired":
            return error_dict(text, GATEWAY_TIMEOUT, "timeout_error")
        if failure.outcome == "cancelled":
            return error_dict(text, TIMEOUT, "request_cancelled")
        if failure.cause == "refused":
            return error_dict(failure.error or text, BAD_REQUEST, "invalid_request_error")
    return error_dict(text, INTERNAL, "server_error")
