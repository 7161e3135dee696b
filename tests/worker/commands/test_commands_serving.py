"""Workers that are paused, put to sleep, stopped, or out of memory, with jobs that run: every one is answered once."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from redis.asyncio import Redis
from safetensors.torch import save_file
from support.engines.manual import all_that_can_happen_now
from support.pools.commanded import LONG, all_done, busy, hurry, slow
from support.pools.late import publish_and_leave
from support.pools.pool import eventually, replies, wait_replies, worker
from support.specimens.messages import SHORT, job

from rolloutmq.messages import Broker, Lease, RolloutResult, SamplingParams
from rolloutmq.messages.errors import InvalidField, TransferTimeout
from rolloutmq.producer.client import RolloutClient
from rolloutmq.producer.control import PoolControl
from rolloutmq.sync import WeightPublisher
from rolloutmq.sync.transfer import Ledger, TransferOrder
from rolloutmq.sync.wire import fetch_manifest
from rolloutmq.worker.scripted.engine import ScriptedEngine

# --- pausing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["interrupt", "retract", "in_place", "finish"])
async def test_what_runs_at_a_pause_comes_back_and_nothing_new_begins(
    mode: Any, redis_db: str, control: PoolControl, broker: Broker
) -> None:
    async with worker(redis_db, engine=slow(), max_running=3, prefetch=3) as running:
        jobs = await busy(broker, running)
        (await control.pause(mode)).check()
        assert running.status.state == "paused"
        more = [job(sampling=SHORT) for _ in range(2)]
        await broker.enqueue(more)
        if mode == "finish":
            hurry(running)
            await all_done(broker, jobs)
        elif mode == "in_place":
            held = running.sampled
            await all_that_can_happen_now()
            assert running.sampled == held != []
        else:
            assert running.generation.running == 0
            assert running.engine.ops.flushes == (1 if mode == "retract" else 0)
        state = (await control.version()).results[running.id]
        assert (state["paused"], state["state"]) == (mode, "paused")
        (await control.resume()).check()
        hurry(running)
        await all_done(broker, jobs + more)
        assert running.status.state == "serving"


async def test_a_pause_that_aborts_gives_clients_what_there_is_and_leaves_what_is_queued(
    redis_db: str, control: PoolControl
) -> None:
    client = RolloutClient(redis_db)
    async with client, worker(redis_db, engine=slow(), max_running=3, prefetch=0) as running:
        handle = await client.submit(token_ids=[1], n=3, sampling=LONG)
        await eventually(lambda: running.generation.running == 3 and min(running.sampled, default=0) > 1)
        queued = await client.submit(token_ids=[1], sampling=SHORT)
        told = (await control.pause("abort")).check().results[running.id]
        assert (told["paused"], told["ended"], running.status.held) == ("abort", 1, 0)
        results = await client.wait(handle, 10.0)
        assert {result.finish_reason for result in results} == {"abort"}
        for result in results:
            assert 1 < len(result.token_ids) < LONG.max_new_tokens
        assert running.engine.starts == 1
        (await control.resume()).check()
        hurry(running)
        assert [result.finish_reason for result in await client.wait(queued, 10.0)] == ["length"]


async def test_one_worker_is_paused_and_its_work_goes_to_the_other(
    redis_db: str, control: PoolControl, broker: Broker
) -> None:
    async with worker(redis_db, engine=slow(), max_running=3) as one:
        jobs = await busy(broker, one)
        async with worker(redis_db, max_running=3) as other:
            for mode in ("abort", "finish", "in_place"):
                with pytest.raises(InvalidField, match="hand_back=True: false, or mode 'interrupt' or 'retract'"):
                    await control.pause(mode, hand_back=True, worker_id=one.id)
            (await control.pause("interrupt", hand_back=True, worker_id=one.id)).check()
            await all_done(broker, jobs)
            assert other.status.state == "serving"
            assert one.status.held == 0


@pytest.mark.parametrize("what", ["claimed", "published"])
async def test_what_is_just_being_claimed_or_published_is_handed_back_too(
    what: str, redis_db: str, control: PoolControl, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a job would stay, with all samples but those, until somebody resumes this worker."""
    begun, go_on = asyncio.Event(), asyncio.Event()
    name = {"claimed": "claim", "published": "complete"}[what]
    tell = getattr(Lease, name)

    async def held_up(lease: Lease, *told: Any) -> Any:
        answer = await tell(lease, *told) if what == "claimed" else None
        if answer is None or answer:
            begun.set()
            await go_on.wait()
        return await tell(lease, *told) if what == "published" else answer

    monkeypatch.setattr(Lease, name, held_up)
    engine = ScriptedEngine(
        tokens_per_s=20.0
    )  # what runs does not end by itself before a busy machine comes to pause it
    async with worker(redis_db, engine=engine, max_running=3) as running:
        one = job(n=3, sampling=LONG)
        await broker.enqueue([one])
        if what == "published":
            await eventually(lambda: running.generation.running == 3)
            running.generation.end([next(iter(running.generation.in_flight.running.values()))])
        await begun.wait()
        asked = asyncio.create_task(control.pause("interrupt", hand_back=True))
        await eventually(lambda: running.generation.state.paused)
        go_on.set()
        (await asked).check()
        assert running.status.held == 0
        assert await broker.redis.zcard(broker.keys.queues[1]) == 1


async def test_a_pause_in_place_can_become_another_one(redis_db: str, control: PoolControl, broker: Broker) -> None:
    async with worker(redis_db, engine=slow(), max_running=3) as running:
        jobs = await busy(broker, running)
        (await control.pause("in_place")).check()
        (await control.pause("in_place")).check()
        (await control.pause("interrupt")).check()
        assert (running.generation.running, running.engine.ops.frozen) == (0, False)
        (await control.resume()).check()
        hurry(running)
        await all_done(broker, jobs)


async def test_nothing_that_brings_weights_thaws_an_engine_that_is_paused_in_place(
    redis_db: str, control: PoolControl, broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    async with worker(redis_db, engine=slow(), max_running=3) as running:
        jobs = await busy(broker, running)
        (await control.pause("in_place")).check()
        held = running.sampled
        asked: list[str] = []
        operate = running.engine.operate
        monkeypatch.setattr(running.engine, "operate", lambda what, params: asked.append(what) or operate(what, params))
        for ask in (control.load(str(tmp_path), 5), control.flush_cache(), control.abort(), control.sleep()):
            (refused,) = (await ask).values()
            assert refused.kind == "RequestRefused", refused
        with WeightPublisher(redis_db, join_timeout_s=0.2) as publisher:
            handle = await asyncio.to_thread(publisher.publish, 1, {"w": torch.ones(2)})
            assert (await asyncio.to_thread(handle.wait)).state in {"failed", "aborted"}
        assert (asked, running.engine.ops.frozen) == ([], True)
        assert running.sampled == held != []
        (await control.resume()).check()
        hurry(running)
        await all_done(broker, jobs)


async def test_abort_cancels_what_is_held_and_leaves_what_is_queued(
    redis_db: str, control: PoolControl, broker: Broker
) -> None:
    async with worker(redis_db, engine=slow(), max_running=2, prefetch=0) as running:
        jobs = [job(sampling=LONG) for _ in range(2)]
        await broker.enqueue(jobs)
        await eventually(lambda: running.generation.running == 2)
        queued = job(sampling=SHORT)
        await broker.enqueue([queued])
        answer = (await control.abort()).check()[running.id]
        assert answer.result["cancelled"] == 2
        found = {reply.outcome.job_id: reply.outcome for reply in await wait_replies(broker, 3)}
        for each in jobs:
            failure = found[each.id]
            assert (failure.outcome, failure.cause) == ("cancelled", "aborted by an operator")
        assert isinstance(found[queued.id], RolloutResult)


async def test_an_interruption_alone_costs_nothing(redis_db: str, control: PoolControl, broker: Broker) -> None:
    async with worker(redis_db, engine=slow(), max_running=3) as running:
        jobs = await busy(broker, running)
        assert (await control.abort(drop=False)).check()[running.id].result == {"running": 3, "cancelled": 0}
        hurry(running)
        await all_done(broker, jobs)


async def test_a_drain_lifts_a_pause_in_place_and_saves_what_there_is(
    redis_db: str, control: PoolControl, broker: Broker
) -> None:
    async with worker(redis_db, engine=slow(), max_running=3, drain_s=3.0) as running:
        jobs = await busy(broker, running)
        (await control.pause("in_place")).check()
        await running.stop()
        assert await broker.redis.zcard(broker.keys.queues[1]) + len(await replies(broker)) == 3
    async with worker(redis_db, max_running=3):
        await all_done(broker, jobs)


async def test_the_whole_pool_is_stopped_in_time(redis_db: str, control: PoolControl, broker: Broker) -> None:
    async with worker(redis_db, engine=slow(), max_running=1) as one, worker(redis_db) as other:
        answers = await control.stop(drain_s=0.5, timeout=20.0)
        assert answers.ok, answers.told()
        assert set(answers) == {one.id, other.id}
        assert await broker.workers() == []
        for running in (one, other):
            await asyncio.wait_for(running.task, 10)
            assert not await running.engine.healthy()


async def test_a_worker_that_does_not_leave_is_told_of(control: PoolControl, joined: Any, db: Redis) -> None:
    await joined("stays")
    answers = await control.stop(timeout=0.3)
    assert (answers["stays"].kind, answers["stays"].error) == ("NoAnswer", "still in the pool after 0.3 s")


# --- memory and caches -----------------------------------------------------------------------------------------------


async def test_what_runs_when_the_engine_goes_to_sleep_comes_back_when_it_wakes(
    redis_db: str, control: PoolControl, broker: Broker
) -> None:
    engine = slow()
    engine.ops.keeps_weights = True
    async with worker(redis_db, engine=engine, max_running=3, prefetch=3) as running:
        jobs = await busy(broker, running)
        answer = (await control.sleep()).check()[running.id]
        assert answer.result["asleep"] == ["cuda_graph", "kv_cache", "weights"]
        more = job(sampling=SHORT)
        await broker.enqueue([more])
        again = (await control.sleep()).check()[running.id]
        assert again.result["asleep"] == answer.result["asleep"]
        assert (await control.wake(["kv_cache"]))[running.id].error.startswith("wake kv_cache: the weights are asleep")
        assert (await control.pause("in_place"))[running.id].kind == "RequestRefused"
        assert (await control.flush_cache())[running.id].kind == "RequestRefused"
        assert await replies(broker) == []
        assert running.generation.running == 0
        for tags in (["weights"], ["kv_cache"], ["cuda_graph"]):
            for _ in range(2):  # an answer may be lost: what is awake may be woken again
                assert (await control.wake(tags)).check()[running.id].result["intact"]
        hurry(running)
        await all_done(broker, [*jobs, more])
        assert (running.engine.starts, await running.engine.healthy()) == (1, True)


async def test_an_engine_that_cannot_sleep_is_not_disturbed(
    redis_db: str, control: PoolControl, broker: Broker
) -> None:
    engine = slow()
    engine.ops.can_sleep = False
    async with worker(redis_db, engine=engine, max_running=3) as running:
        await busy(broker, running)
        answer = (await control.sleep())[running.id]
        assert (answer.kind, "without a memory saver" in answer.error) == ("RequestRefused", True)
        assert running.generation.running == 3
        assert running.status.state == "serving"
        hurry(running)


async def test_the_models_own_weights_do_not_serve_a_pool_that_has_newer_ones(
    redis_db: str, broker: Broker, control: PoolControl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that waits for the pool's version, which nobody has any more, sleeps and wakes."""
    save_file({"first": torch.arange(10.0)}, tmp_path / "model.safetensors")
    model = ScriptedEngine().info
    monkeypatch.setattr(ScriptedEngine, "info", property(lambda engine: replace(model, model=str(tmp_path))))
    await broker.redis.hset(broker.keys.weights, "committed", 5)
    async with worker(redis_db) as running:
        await eventually(lambda: running.status.state == "syncing")
        assert (await control.set_version(6))[running.id].kind == "RequestRefused"
        (await control.sleep(["weights"])).check()
        woken = (await control.wake()).check()[running.id].result
        assert (woken["stale"], running.engine.weights["first"].tolist()) == (False, list(range(10)))
        assert not running.generation.state.in_service
        assert running.worker._status().state == "syncing"


async def test_what_a_command_overwrites_is_offered_to_nobody_any_more(
    redis_db: str, control: PoolControl, broker: Broker, tmp_path: Path
) -> None:
    save_file({"first": torch.arange(10.0)}, tmp_path / "model.safetensors")
    ledger = Ledger(broker.redis, "default")
    async with worker(redis_db) as running:
        await publish_and_leave(redis_db, 1)
        _, (holder,) = await ledger.holders(1)
        order = TransferOrder.from_holders(None, [holder], "", "late", timeout_s=5.0)
        assert (await asyncio.to_thread(fetch_manifest, order))[0].version == 1
        (await control.load(str(tmp_path), 4)).check()
        assert running.generation.version == 4
        with pytest.raises(TransferTimeout, match="not offered here"):
            await asyncio.to_thread(fetch_manifest, order)


async def test_the_prefix_cache_is_flushed_though_requests_run(
    redis_db: str, control: PoolControl, broker: Broker
) -> None:
    async with worker(redis_db, engine=slow(), max_running=3) as running:
        jobs = await busy(broker, running)
        (await control.flush_cache()).check()
        assert running.engine.ops.flushes == 1
        answer = (await control.clear_storage())[running.id]
        assert answer.kind == "RequestRefused"
        hurry(running)
        await all_done(broker, jobs)


@pytest.mark.parametrize("state", ["in_place", "asleep"])
async def test_an_engine_that_dies_frozen_or_asleep_comes_up_awake_and_a_pause_stays_one(
    state: str, redis_db: str, control: PoolControl, broker: Broker
) -> None:
    async with worker(redis_db, engine=slow(), max_running=3) as running:
        jobs = await busy(broker, running)
        (await (control.pause("in_place") if state == "in_place" else control.sleep())).check()
        running.engine.kill()
        await eventually(lambda: running.engine.starts == 2 and not running.generation.state.dead.is_set())
        told = (await control.version()).results[running.id]
        assert (told["asleep"], told["holds"]) == ([], [])
        assert told["paused"] == ("interrupt" if state == "in_place" else "")
        (await control.resume()).check()
        hurry(running)
        await all_done(broker, jobs)
        assert running.engine.starts == 2


# --- memory that is not enough ---------------------------------------------------------------------------------------


async def test_out_of_memory_is_tried_again_with_fewer_at_once(redis_db: str, broker: Broker) -> None:
    engine = slow()
    engine.memory_for = 2
    async with worker(redis_db, engine=engine, max_running=8, prefetch=0) as running:
        jobs = [job(sampling=SamplingParams(max_new_tokens=20)) for _ in range(12)]
        await broker.enqueue(jobs)
        await all_done(broker, jobs)
        assert running.generation.slots.limit <= 4
        assert running.engine.starts == 1
        assert {reply.outcome.attempt for reply in await replies(broker)} == {1}


async def test_an_engine_that_dies_gets_half_as_much_and_then_more_again(
    redis_db: str, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with worker(redis_db, engine=slow(), max_running=8, prefetch=0) as running:
        jobs = await busy(broker, running)
        running.engine.kill()
        await eventually(lambda: running.engine.starts == 2)
        slots = running.generation.slots
        assert (slots.limit, running.status.max_running) == (4, 4), "it has no more to offer"
        monkeypatch.setattr("rolloutmq.worker.slots.GROW_S", 0.0)
        await eventually(lambda: slots.limit == 8)
        hurry(running)
        await all_done(broker, jobs)
