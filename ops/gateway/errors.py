"""Which HTTP error an error of the pool is."""

from __future__ import annotations

from ...messages.errors import RequestRefused, RolloutMQError, TurnRefused
from ...producer.openai import error_of
from ..http import Refused
from .answers import LATER
from .requests import KeyReused

NO_RETRY = {"x-should-retry": "false"}
"""OpenAI's clients send a 409 again, unless they are told not to."""


def told(error: RolloutMQError) -> Refused:
    """What the client is told of an error that is no Refused."""
    if isinstance(error, KeyReused):
        return Refused(422, "idempotency_key_reused", str(error), param=error.field, headers=NO_RETRY)
    if isinstance(error, TurnRefused):
        later = error.reason in LATER
        again = {"retry_after_s": 1} if later else {"headers": NO_RETRY}
        return Refused(503 if later else 409, f"session_{error.reason}", str(error), **again)
    if isinstance(error, RequestRefused):
        return Refused(400, "invalid_request_error", str(error))
    found = error_of(error)["error"]
    wait = 1 if found["code"] in {429, 503} else None
    return Refused(found["code"], found["type"], found["message"], param=found["param"], retry_after_s=wait)
