"""The tests of `test_in_place` with overlap scheduling, where a batch is under way when the weights change."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import test_in_place as normal
from support.engines.fixtures import KV_TOKENS
from support.engines.fixtures import MAX_RUNNING as RUNNING
from support.pools.in_place import InPlaceEngine

from rolloutmq.worker.sglang.engine import SGLangConfig

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(300),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tiny_model: Path) -> AsyncIterator[InPlaceEngine]:
    config = SGLangConfig(
        model=str(tiny_model),
        dtype="float32",
        max_running=RUNNING,
        max_total_tokens=KV_TOKENS,
        overlap_schedule=True,
    )
    engine = InPlaceEngine(config)
    await engine.start()
    yield engine
    await engine.close()


@pytest.fixture(scope="module")
def switching(engine: InPlaceEngine) -> InPlaceEngine:
    """Starts with version 0."""
    return engine


judge, versions = normal.judge, normal.versions
test_running_requests_go_on_and_new_ones_find_nothing_old = (
    normal.test_running_requests_go_on_and_new_ones_find_nothing_old
)
test_two_switches_within_one_request = normal.test_two_switches_within_one_request
test_a_version_that_has_been_used_cannot_come_again = normal.test_a_version_that_has_been_used_cannot_come_again
