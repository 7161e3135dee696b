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


def error_of(error: RolloutMQError) -> dict[str, Any]:
    """The answer to a request that ended in this error."""
    if isinstance(error, JobFailed):
        return _of_failure(error)
    # As the body calls it: of "max_tokens (sampling.max_new_tokens)" the first word.
    param = error.field.partition(" ")[0] if isinstance(error, InvalidField) else None
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
