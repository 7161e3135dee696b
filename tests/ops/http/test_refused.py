"""Which answer an error is, in every server of the package."""

from __future__ import annotations

import pytest
from redis.exceptions import ConnectionError as RedisGone
from starlette.exceptions import HTTPException

from rolloutmq.messages.errors import InvalidField, RedisUnavailable, RolloutMQError
from rolloutmq.ops.http import Refused, refused_of


def conflict(error: RolloutMQError) -> Refused:
    return Refused(409, "conflict", str(error))


@pytest.mark.parametrize(
    ("error", "alone", "told"),
    [
        (Refused(418, "teapot", "No."), (418, "teapot"), (418, "teapot")),
        (HTTPException(405), (405, "no_such_route"), (405, "no_such_route")),
        (RedisGone("at redis:6379"), (503, "service_unavailable"), (503, "service_unavailable")),
        (TimeoutError(), (503, "service_unavailable"), (503, "service_unavailable")),
        (RedisUnavailable("gone"), (503, "service_unavailable"), (409, "conflict")),
        (InvalidField("n", 0, "at least 1"), (400, "invalid_request"), (409, "conflict")),
    ],
)
def test_an_error_has_one_answer(error: Exception, alone: tuple[int, str], told: tuple[int, str]) -> None:
    for expected, answer in ((alone, refused_of(error)), (told, refused_of(error, conflict))):
        assert (answer.status, answer.code) == expected
        assert "6379" not in str(answer), "where Redis is is no stranger's business"


def test_a_bug_is_no_answer() -> None:
    with pytest.raises(KeyError):
        refused_of(KeyError("a bug"), conflict)
