"""What a pool needs, measured from one look at it to the next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from redis.asyncio import Redis
from support.pools.fixtures import MakeLease
from support.pools.pool import short_retries, status
from support.specimens.messages import job, result

from rolloutmq.messages import Broker, connect
from rolloutmq.messages.broker import Finished, PoolLoad
from rolloutmq.ops.metrics.demand import Demand, PoolWatch
from rolloutmq.ops.metrics.families import scale_families
from rolloutmq.ops.metrics.reading import PoolReader, Reading
from rolloutmq.ops.metrics.totals import Totals
from rolloutmq.ops.redis.embedded import EmbeddedRedis
from rolloutmq.ops.scale import History, PoolView, ScaleSettings, decide
from rolloutmq.producer.diagnosis import PoolReading

LOAD = PoolLoad(**dict.fromkeys(PoolLoad.__slots__, 0) | {"queued": (0, 0, 0)})
NOTHING = PoolReading("default", 0.0, LOAD)


def looker() -> Callable[..., PoolView]:
    """Looks at readings of one worker `w1`, or of none, one after the other."""
    demand, totals = Demand(), Totals()

    def look(
        now: float, committed: int = 0, queued: int = 0, unread: int = 0, taken: int = 0, **worker: Any
    ) -> PoolView:
        workers = (status("w1", **worker),) if worker else ()
        load = replace(LOAD, queued=(0, queued, 0), open_jobs=queued, unread_bytes=unread, taken_bytes=taken)
        leases = {it.worker_id: 1.0 for it in workers}
        pool = replace(NOTHING, load=load, workers=workers, lease_ends=leases, committed=committed)
        reading = Reading(pool, (1.0,) * 3, max_staleness=2 if queued else None)
        totals.take_in(reading, now)
        return demand.view(reading, totals, now)

    return look


def test_what_a_worker_can_do_is_measured_while_its_slots_are_taken() -> None:
    look = looker()
    look(0.0, running=4, max_running=4)
    assert look(10.0, running=4, max_running=4).worker_tokens_per_s is None
    full = look(20.0, running=4, max_running=4, generated_tokens=2000, finished_samples=20)
    assert (full.worker_tokens_per_s, full.tokens_per_sample) == pytest.approx((100.0, 100.0), rel=0.01)
    half = look(120.0, running=2, max_running=4, generated_tokens=2000, finished_samples=20)
    later = look(180.0, running=2, max_running=4, generated_tokens=2600, finished_samples=26)
    assert half.worker_tokens_per_s == later.worker_tokens_per_s == full.worker_tokens_per_s
    assert (later.tokens_per_s, later.sample_s) == (10.0, 20.0)
    gone = look(190.0)
    assert (gone.serving, gone.worker_tokens_per_s, gone.tokens_per_sample) == (0, full.worker_tokens_per_s, 100.0)


def test_one_look_takes_what_the_heartbeats_say() -> None:
    assert looker()(0.0, running=4, max_running=4, tokens_per_s=50.0).worker_tokens_per_s == 50.0
    assert looker()(0.0, running=1, max_running=4, tokens_per_s=50.0).worker_tokens_per_s is None


def test_versions_say_how_often_the_trainer_publishes() -> None:
    look = looker()
    seen = [look(at, version).version_s for at, version in ((0.0, 7), (50.0, 8), (60.0, 8), (70.0, 9), (80.0, 11))]
    assert seen == [None, None, None, 20.0, 10.0]


def test_the_staleness_that_jobs_allow_is_known_for_as_long_as_the_trainer_trains() -> None:
    look = looker()
    for at in (0.0, 10.0, 20.0):
        look(at, int(at), queued=1)
    assert look(30.0, 30).eta == 2
    assert look(1000.0, 30).eta is None


def test_what_clients_take_is_measured_over_several_versions() -> None:
    look = looker()
    look(0.0, 1, taken=10_000, generated_tokens=0)
    assert look(20.0, 1, unread=2000, taken=10_000, generated_tokens=200).taken_tokens_per_s is None, "too short"
    later = look(60.0, 1, unread=4500, taken=11_500, generated_tokens=600)  # 6,000 bytes are made, 1,500 are taken
    assert (later.taken_tokens_per_s, later.unread_s) == (2.5, 180.0)
    look(61.0, 2, unread=4500, taken=11_500, generated_tokens=600)
    look(161.0, 3, unread=4500, taken=12_500, generated_tokens=700)  # a version takes 100 s: the window is 400 s
    quiet = look(261.0, 4, unread=4500, taken=12_500, generated_tokens=700)
    assert quiet.taken_tokens_per_s is not None
    assert quiet.taken_tokens_per_s > 0
    assert look(262.0, 4, unread=0, taken=0).unread_s is None, "Redis has lost its data"


async def test_what_a_client_acknowledges_is_counted(db: Redis, broker: Broker, joined: MakeLease) -> None:
    jobs = [job(), job()]
    client = jobs[0].reply_to
    await broker.enqueue(jobs)
    lease = await joined("w1")
    await lease.claim(9, 9, 0)
    await lease.complete([Finished(one.id, 1, 0, result(one)) for one in jobs])
    made = (await broker.load()).unread_bytes
    first, *_ = await broker.read_replies(client, "0")
    await broker.ack(client, [first])
    load = await broker.load()
    assert 0 < load.taken_bytes < made
    assert load.unread_bytes + load.taken_bytes == made
    await broker.ack(client, [first])
    assert (await broker.load()).taken_bytes == load.taken_bytes, "an acknowledgement that is sent twice"


@pytest.mark.parametrize(
    ("state", "where"),
    [
        ("serving", "serving"), ("updating", "serving"), ("starting", "starting"), ("syncing", "starting"),
        ("quarantined", "starting"), ("paused", "paused"), ("draining", "draining"),
    ],
)  # fmt: skip
def test_each_worker_counts_once(state: str, where: str) -> None:
    view = looker()(0.0, state=state, running=1)
    counts = {name: getattr(view, name) for name in ("serving", "starting", "paused", "draining")}
    assert counts == dict.fromkeys(counts, 0) | {where: 1}
    assert view.running == (1 if where == "serving" else 0)


async def test_jobs_for_weights_that_are_not_there_are_held_back(db: Redis, broker: Broker, joined: MakeLease) -> None:
    lease = await joined("w1", max_running=8)
    await broker.enqueue([job(n=2, min_version=3, max_staleness=1), job(n=2, min_version=0, max_staleness=4)])
    watch = PoolWatch(db, "default")
    view = await watch.look()
    assert (view.queued, view.held_back, view.eta) == (4, 0, 4)
    (claim,) = await lease.claim(2, 8, version=0)
    view = await watch.look()
    assert (view.queued, view.held_back, view.eta) == (0, 2, 1)
    assert decide(view, ScaleSettings(), History())[0].state == "bound by staleness"
    assert claim.n == 2
    await db.hset(broker.keys.weights, "committed", "3")
    view = await watch.look()
    assert (view.queued, view.held_back) == (2, 0)


async def test_a_pool_that_cannot_be_read_is_none(redis_server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch) -> None:
    short_retries(monkeypatch)
    async with connect(redis_server.url) as redis:
        watch = PoolWatch(redis, "default")
        assert (await watch.look()) is not None
        redis_server.kill()
        assert await watch.look() is None
        redis_server.start()


async def test_an_outage_is_logged_once(
    redis_server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    short_retries(monkeypatch)
    caplog.set_level("INFO", "rolloutmq.ops.metrics.demand")
    async with connect(redis_server.url) as redis:
        watch = PoolWatch(redis, "default")
        for _ in range(2):
            redis_server.kill()
            assert [await watch.look() for _ in range(3)] == [None] * 3
            redis_server.start()
            assert await watch.look() is not None
    said = [record.getMessage() for record in caplog.records if record.name.endswith("demand")]
    assert [text.partition(":")[0] for text in said] == ["the pool cannot be read", "the pool can be read again"] * 2


async def test_hostile_heartbeats_bring_no_view_to_fall(db: Redis, broker: Broker, joined: MakeLease) -> None:
    most = (1 << 64) - 1
    await joined("w1", running=most, max_running=most, generated_tokens=most, finished_samples=1, tokens_per_s=1e308)
    await joined("w2", running=most, tokens_per_s=1e308)
    await broker.enqueue([job()])
    reader, demand, totals, history = PoolReader(db, "default"), Demand(), Totals(), History()
    for now in (0.0, 5.0, 5.0, 1.0):
        reading = await reader.read()
        totals.take_in(reading, now)
        decision, history = decide(demand.view(reading, totals, now), ScaleSettings(), history)
        assert 0 <= decision.wanted <= 4
        assert sum(sample.value for family in scale_families(decision) for sample in family.samples) >= 1
