"""How evenly workers are loaded: the shares are those that claims follow, whatever somebody has written into Redis."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from redis.asyncio import Redis
from support.pools.fixtures import MakeLease
from support.specimens.messages import job

from rolloutmq.messages import Broker
from rolloutmq.ops.sharing import Sharing, Taker, read_sharing, shared

IDLE = Taker(0, 256, 0.0, "-")


def of(*takers: Taker) -> Sharing:
    return Sharing({str(number): taker for number, taker in enumerate(shared(takers))})


@pytest.mark.parametrize(
    ("takers", "shares", "imbalance"),
    [
        ([], [], 1.0),
        ([IDLE] * 3, [0, 0, 0], 1.0),
        ([replace(IDLE, held=64)] * 4, [64] * 4, 1.0),
        ([replace(IDLE, held=256), *[IDLE] * 3], [64] * 4, 4.0),
        ([Taker(256, 256, 0.0, "-"), Taker(64, 64, 0.0, "-")], [256, 64], 1.0),  # both are full
        ([Taker(200, 256, 0.0, "-"), Taker(0, 32, 0.0, "-")], [168, 32], 200 / 168),
        ([Taker(80, 256, 400.0, "-", "a"), Taker(20, 256, 100.0, "-", "b")], [80, 20], 1.0),
        ([Taker(50, 256, 400.0, "-", "a"), Taker(50, 256, 100.0, "-", "b")], [80, 20], 2.5),
        (
            [Taker(50, 256, 100.0, "-", "a"), Taker(50, 256, 120.0, "-", "b")],
            [50, 50],
            1.0,
        ),  # nearly as fast
        ([Taker(50, 256, 400.0, "-", "a"), Taker(50, 256, 100.0, "-", "a")], [50, 50], 1.0),  # engines of one kind
        ([replace(IDLE, held=1), *[IDLE] * 3], [0.25] * 4, 1.0),  # one sample is somewhere
        ([replace(IDLE, held=2), *[replace(IDLE, held=1)] * 3], [1.25] * 4, 1.0),
        ([Taker(8, 64, 0.0, "a"), Taker(0, 64, 0.0, "a"), Taker(0, 64, 0.0, "b")], [4, 4, 0], 2.0),
    ],
)
def test_shares_and_the_highest_load_beside_its_own(takers: list[Taker], shares: list[float], imbalance: float) -> None:
    found = of(*takers)
    assert [taker.share for taker in found.takers.values()] == pytest.approx(shares)
    assert found.imbalance == pytest.approx(imbalance)
    assert (imbalance > 1.25) == (found.count("above") > 0)


def test_workers_are_below_at_or_above_their_share() -> None:
    found = of(*(replace(IDLE, held=held) for held in (9, 7, 8, 4, 12)))
    assert {place: found.count(place) for place in ("below", "at", "above")} == {"below": 1, "at": 3, "above": 1}


async def test_a_share_is_the_one_that_claims_follow(broker: Broker, joined: MakeLease) -> None:
    fast, slow = await joined("fast"), await joined("slow")
    for lease, pace in ((fast, 400.0), (slow, 100.0)):
        lease.holds, lease.pace, lease.engine = (lambda: 0), (lambda pace=pace: pace), f"{pace:.0f}"
        assert await lease.claim(64, 256, 0) == []
    await broker.enqueue([job() for _ in range(50)])
    assert len(await fast.claim(64, 256, 0)) == 40 == fast.share
    assert (await read_sharing(broker.parts)).imbalance == pytest.approx(40 / 32), (
        "the slow one has not taken its ten yet"
    )
    assert len(await slow.claim(64, 256, 0)) == 10
    found = await read_sharing(broker.parts)
    assert {worker: (one.held, one.most, one.share) for worker, one in found.takers.items()} == {
        "fast": (40, 256, pytest.approx(40)),
        "slow": (10, 256, pytest.approx(10)),
    }


async def test_what_nobody_wrote_is_left_out(broker: Broker, db: Redis) -> None:
    sound = {b"w1": b"8 64 0 1 0 - ", b"\xff": b"0 64 1e+03 1 0 - /a@3"}
    damaged: dict[bytes, Any] = {b"": b"", b"a": b"\xff\xfe", b"b": b"1 2", b"c": b"-1 64 0 1 0 - ", b"d": b"9" * 400}
    odd = {b"e": b"0 64 nan 1 0 - ", b"f": b"9 4 inf 1 0 - "}
    await db.hset(broker.keys.takers, mapping=sound | damaged | odd)
    found = (await read_sharing(broker.parts)).takers
    assert {worker: (one.held, one.most, one.pace) for worker, one in found.items()} == {
        "w1": (8, 64, 0), "\ufffd": (0, 64, 1000), "e": (0, 64, 0), "f": (9, 9, 0),
    }  # fmt: skip
    await db.set(broker.keys.takers, "no hash")
    assert await read_sharing(broker.parts) == Sharing()


async def test_a_worker_of_several_shards_has_its_room_once(db: Redis) -> None:
    parts = [Broker(db, "default", shard=shard) for shard in range(2)]
    for part, w1, w2 in zip(parts, ("5 64", "3 62"), ("0 64", "8 64"), strict=True):
        await db.hset(part.keys.takers, mapping={"w1": f"{w1} 0 1 0 - ", "w2": f"{w2} 0 1 0 - "})
    found = await read_sharing(parts)  # type: ignore[arg-type]
    assert {worker: (one.held, one.most) for worker, one in found.takers.items()} == {"w1": (8, 67), "w2": (8, 72)}
    assert found.imbalance == 1
