"""Samples of exactly one version, while workers take others: every token is of that version, and nothing is lost."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.peers.publishing import publisher
from support.pools.late import check_equal, publish, version_of
from support.pools.pool import check_scripted, eventually, looked, saved, wait_replies, worker
from support.specimens.messages import job

from rolloutmq.messages import Broker, GenerateJob, RolloutResult, SamplingParams
from rolloutmq.messages.model import ScoreJob
from rolloutmq.messages.model.weights import UpdateMode
from rolloutmq.ops.journal.live import live_of
from rolloutmq.ops.status import read_state
from rolloutmq.producer.diagnosis import why
from rolloutmq.sync.transfer.ledger import Ledger
from rolloutmq.worker.lease import claims
from rolloutmq.worker.scripted.engine import ScriptedEngine

NEVER_S = 600


@pytest.fixture(autouse=True)
def _nobody_looks_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker claims when it is woken, and not because 20 seconds are over."""
    monkeypatch.setattr(claims, "WAKE_S", NEVER_S)


def exact(version: int, tokens: int = 8, **fields: Any) -> GenerateJob:
    return job(exact_version=version, sampling=SamplingParams(max_new_tokens=tokens), **fields)


async def results(broker: Broker, count: int) -> list[RolloutResult]:
    found = [reply.outcome for reply in await wait_replies(broker, count)]
    for one in found:
        assert isinstance(one, RolloutResult)
        check_scripted(one, 3)
    return found  # type: ignore[return-value]


def by_worker(found: Sequence[RolloutResult]) -> set[tuple[str, tuple[int, ...]]]:
    return {(one.worker_id, one.versions) for one in found}


async def test_evaluation_of_one_version_beside_training(redis_db: str, broker: Broker, ledger: Ledger) -> None:
    async with worker(redis_db, hold_version=1) as kept, worker(redis_db) as follows, publisher(redis_db) as trainer:
        assert not kept.generation.state.in_service, "it serves nothing before it has its version"
        await broker.enqueue([exact(1, n=4)])
        both = await publish(trainer, 1)
        assert (both.state, set(both.workers)) == ("committed", {kept.id, follows.id})
        before = {one.job_id for one in await results(broker, 4)}
        for version in (2, 3):
            report = await publish(trainer, version)
            assert (report.state, report.workers, report.failures) == ("committed", (follows.id,), {})
        assert (version_of(kept), version_of(follows)) == (1, 3)
        await broker.enqueue([*(exact(1) for _ in range(4)), *(exact(3) for _ in range(4)), job(min_version=2)])
        found = [one for one in await results(broker, 13) if one.job_id not in before]
        assert by_worker(found) == {(kept.id, (1,)), (follows.id, (3,))}
        assert (kept.status.state, kept.status.blocks, kept.status.hold_version) == ("serving", (), 1)

        async def none_behind() -> bool:
            state = await read_state(broker)
            return not state["waiting_for_weights"] and {it["version"] for it in state["workers"]} == {1, 3}

        await eventually(none_behind)  # as the next heartbeats say it
        assert sum(kept.status.staleness[1:]) == 0, "none of these is stale"
        epoch = await ledger.epoch(await ledger.new_epoch() - 1)
        assert epoch is not None
        assert (epoch.served, epoch.failures) == ([follows.id], {})


@pytest.mark.parametrize("mode", ["resume", "in_place", "drain"])
async def test_what_runs_when_another_version_comes_stays_of_its_own(
    redis_db: str, broker: Broker, mode: UpdateMode
) -> None:
    engine = ScriptedEngine(tokens_per_s=400)
    async with worker(redis_db, engine=engine) as follows, publisher(redis_db, mode=mode) as trainer:
        await looked(follows)
        tokens = 300 if mode == "drain" else 3000  # more than it has when the version comes
        stays = {"session_id": "s"}  # what belongs to a session is not moved for the sake of even loads
        mine = exact(0, tokens, n=2, **stays)
        plain = job(sampling=SamplingParams(max_new_tokens=tokens), **stays)
        await broker.enqueue([mine, plain])
        await eventually(lambda: len(follows.sampled) == 3 and min(follows.sampled) > 20)
        async with worker(redis_db, hold_version=0) as kept:
            assert (await publish(trainer, 1)).state == "committed"
            found = await results(broker, 3)
            load = await broker.load()
    exactly = [one for one in found if one.job_id == mine.id]
    assert {one.versions for one in exactly} == {(0,)}
    assert load.leases_lost == load.dead == 0
    if mode == "drain":
        assert by_worker(exactly) == {(follows.id, (0,))}
        assert {one.attempt for one in exactly} == {1}
    else:
        assert by_worker(exactly) == {(kept.id, (0,))}
        assert {(one.attempt, len(one.legs)) for one in exactly} == {(2, 1)}, "they went on with what they had"
    (other,) = (one for one in found if one.job_id == plain.id)
    assert (other.worker_id, other.attempt, bool(other.in_place)) == (follows.id, 1, mode == "in_place")


async def test_what_waits_in_a_worker_leaves_it_with_the_version(redis_db: str, broker: Broker) -> None:
    """Samples beyond the slots, and inputs of a task, which are computed on that version, too."""
    engine = ScriptedEngine(tokens_per_s=300)
    async with worker(redis_db, engine=engine, max_running=2, prefetch=0) as follows, publisher(redis_db) as trainer:
        await looked(follows)
        many, task = (
            exact(0, 3000, n=6),
            ScoreJob(token_ids=[1], continuations=([2],) * 3, reply_to="client", exact_version=0),
        )
        await broker.enqueue([many])
        await eventually(lambda: follows.generation.running == 2)
        await broker.enqueue([task])
        assert (await publish(trainer, 1)).state == "committed"
        await eventually(lambda: follows.status.held == 0)
        assert await broker.count_replies("client") == 0
        async with worker(redis_db, hold_version=0) as kept:
            found = [reply.outcome for reply in await wait_replies(broker, 9)]
    scores = [one for one in found if one.job_id == task.id]
    assert {one.version for one in scores} == {0}
    assert {one.versions for one in found if one.job_id == many.id} == {(0,)}
    assert kept.id in {one.worker_id for one in found}


async def test_a_lost_worker_s_sample_goes_on_where_its_version_is(redis_db: str, broker: Broker) -> None:
    slow = ScriptedEngine(tokens_per_s=100)
    async with worker(redis_db, engine=slow, hold_version=0, checkpoint_s=0.1) as first:
        await broker.enqueue([one := exact(0, 3000)])
        await eventually(lambda: saved(broker, one.id))
        async with publisher(redis_db) as trainer, worker(redis_db) as follows:
            assert (await publish(trainer, 1)).state == "committed"
            async with worker(redis_db, hold_version=0) as second:
                await first.die()
                (found,) = await results(broker, 1)
                assert version_of(follows) == 1
    assert (found.worker_id, found.versions, len(found.legs)) == (second.id, (0,), 1)


async def test_it_waits_for_a_version_and_the_wait_says_so(redis_db: str, broker: Broker) -> None:
    async with worker(redis_db) as follows, publisher(redis_db) as trainer:
        await broker.enqueue([one := exact(2)])

        async def told() -> str:
            return "; ".join(reason.told() for reason in await why(broker) if reason.cause == "exact-version")

        said = await eventually(told)
        assert "1 job waits for exactly version 2 of the weights, which no worker has; they have 0." in said
        shown = await live_of(broker, one.id)
        assert shown is not None
        assert shown.waits == "a worker that has exactly weights version 2"
        assert (shown.facts["exact_version"], shown.facts["min_version"]) == (2, None)
        for version in (1, 2):
            await publish(trainer, version)
        assert by_worker(await results(broker, 1)) == {(follows.id, (2,))}


async def test_a_worker_takes_an_older_version_from_its_snapshot(redis_db: str, broker: Broker, tmp_path: Path) -> None:
    saving = publisher(redis_db, snapshots=str(tmp_path), snapshot_every=1)
    async with worker(redis_db), saving as trainer:
        for version in (1, 2, 3):
            await publish(trainer, version)
            await eventually((tmp_path / f"v{version:012d}").exists)  # none is skipped
        engine = ScriptedEngine()
        await broker.enqueue([exact(2)])
        async with worker(redis_db, engine=engine, hold_version=2, snapshots=str(tmp_path)) as kept:
            assert by_worker(await results(broker, 1)) == {(kept.id, (2,))}
            check_equal(engine, 2)


async def test_a_worker_that_finds_its_version_nowhere_says_so_and_serves_nothing(
    redis_db: str, broker: Broker
) -> None:
    async with worker(redis_db), publisher(redis_db) as trainer:
        for version in (1, 2):
            await publish(trainer, version)
        async with worker(redis_db, hold_version=1) as kept:
            await eventually(lambda: "unavailable" in kept.status.blocks)
            assert "is to keep version 1, and has 0" in kept.status.why
            assert kept.status.state == "syncing"


async def test_a_pool_of_workers_that_stay_holds_no_trainer_up(redis_db: str) -> None:
    """As in an empty pool: who comes later takes the version from the trainer."""
    async with worker(redis_db, hold_version=0) as kept, publisher(redis_db) as trainer:
        await looked(kept)
        for version in (1, 2):
            report = await publish(trainer, version)
            assert (report.state, report.workers, report.failures) == ("committed", (), {})
        async with worker(redis_db) as late:
            await eventually(lambda: version_of(late) == 2)


async def test_an_engine_that_died_comes_back_with_the_version_that_is_kept(
    redis_db: str, broker: Broker, tmp_path: Path
) -> None:
    engine, saving = ScriptedEngine(), publisher(redis_db, snapshots=str(tmp_path), snapshot_every=1)
    async with worker(redis_db, engine=engine, hold_version=1, snapshots=str(tmp_path)) as kept, saving as trainer:
        await publish(trainer, 1)
        await eventually((tmp_path / "v000000000001").exists)
        await publish(trainer, 2)
        engine.kill()
        await broker.enqueue([exact(1)])
        assert by_worker(await results(broker, 1)) == {(kept.id, (1,))}
        assert kept.status.engine_restarts == 1
