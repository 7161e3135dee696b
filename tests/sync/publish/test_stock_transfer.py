"""The switch to SGLang's own update group: what it refuses, and that those who do not use it see nothing of it."""

from __future__ import annotations

import msgpack
import pytest
from support.pools.pool import worker
from support.specimens.messages import specimens
from test_publish import publish, publisher

from rolloutmq import InvalidField, WeightPublisher
from rolloutmq.messages import WeightAnnouncement
from rolloutmq.messages.codec import decode, encode


def test_the_switch_takes_two_values() -> None:
    with pytest.raises(InvalidField, match="transfer='nccl': 'own' or 'stock'"):
        WeightPublisher(transfer="nccl")  # type: ignore[arg-type]


def test_in_place_is_refused_with_the_reason() -> None:
    with pytest.raises(InvalidField, match=r"mode='in_place'.*every request has ended"):
        WeightPublisher(transfer="stock", mode="in_place")


def test_the_announcement_says_so_only_where_it_is_so() -> None:
    plain = specimens()["announcement"]
    assert b"stock" not in encode(plain)
    stock = plain.model_copy(update={"stock": True})
    assert msgpack.unpackb(encode(stock)[3:])["stock"] is True
    assert decode(encode(stock), WeightAnnouncement) == stock


async def test_an_engine_without_such_a_group_says_so_and_keeps_its_weights(redis_db: str) -> None:
    async with worker(redis_db) as one, publisher(redis_db, transfer="stock") as source:
        report = await publish(source, 1)
        assert report.state == "failed"
        assert "transfer='own'" in report.failures[one.id]
        assert one.engine.weights == {}
        assert not one.worker._follower.quarantined
    async with worker(redis_db) as other, publisher(redis_db) as source:
        report = await publish(source, 2)
        assert (report.state, report.workers) == ("committed", (other.id,))
