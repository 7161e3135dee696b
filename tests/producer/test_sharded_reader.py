"""A client that reads the reply streams of two shards."""

from __future__ import annotations

import pytest

from rolloutmq import JobFailure, RolloutClient
from rolloutmq.messages import connect
from rolloutmq.messages.broker import broker_of
from rolloutmq.messages.ids import new_id
from rolloutmq.messages.redis import shard_of

pytestmark = pytest.mark.one_shard


@pytest.mark.parametrize("shard", [0, 1])
async def test_an_entry_leaves_the_stream_on_which_it_was_whatever_job_it_names(redis_db: str, shard: int) -> None:
    """Else what somebody wrote there by hand would stay, and count as unread, for the week that the stream lives."""
    url = f"{redis_db}?shards=2"
    names = {it: next(name for name in iter(new_id, None) if shard_of(name, 2) == it) for it in (0, 1)}
    async with connect(url, pool="default") as redis:
        part = broker_of(redis, "default").parts[shard]
        for name in names.values():
            await part.redis.xadd(part.keys.reply("client"), {"j": name, "o": "dead", "c": "written by hand"})
        async with RolloutClient(url, client_id="client") as client:
            taken = [outcome async for outcome in client.results(timeout=10)]
        assert {outcome.job_id for outcome in taken if isinstance(outcome, JobFailure)} == set(names.values())
        assert await part.count_replies("client") == 0
        assert (await part.load()).unread_bytes == 0
