"""A pool's operations on the shared server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rolloutmq.ops.operations.rq_queue import OperationQueue


@pytest.fixture
def queue(redis_db: str) -> Iterator[OperationQueue]:
    with OperationQueue(redis_db, "default") as opened:
        yield opened
