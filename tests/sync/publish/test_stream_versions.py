"""A stream that weights updates cross: every token still says which version sampled it, and none is shown twice."""

from __future__ import annotations

from typing import Any

import pytest
from support.peers.publishing import publish, publisher
from support.pools.commanded import hurry
from support.pools.pool import check_scripted, worker
from support.specimens.messages import tokens

from rolloutmq import RolloutClient, SamplingParams
from rolloutmq.worker.scripted.engine import ScriptedEngine


@pytest.mark.parametrize("mode", ["resume", "in_place"])
async def test_updates_while_streaming(redis_db: str, mode: Any) -> None:
    sampling = SamplingParams(max_new_tokens=5000)  # it runs until `hurry`
    async with (
        worker(redis_db, engine=ScriptedEngine(tokens_per_s=200.0)) as running,
        publisher(redis_db, mode=mode) as source,
        RolloutClient(redis_db) as client,
    ):
        assert (await publish(source, 1)).state == "committed"  # the first one takes longer
        segments: list[tuple[int, int]] = []
        shown, result, version = 0, None, 1
        async for delta in client.stream(tokens(sampling=sampling), timeout=60):
            assert (delta.start, delta.restarted) == (shown, False)
            shown += len(delta.token_ids)
            segments += delta.segments
            result = delta.result
            if version < 3 and shown > 100 * version:
                version += 1
                assert (await publish(source, version)).state == "committed"
                if version == 3:
                    hurry(running)
    check_scripted(result, 3)
    assert result.versions == (1, 2, 3)
    by_version = {number: sum(count for v, count in segments if v == number) for number in (1, 2, 3)}
    assert by_version == dict(result.segments)
