"""A live pool on the page: one reader for all browsers, what they are told, and a Redis that goes away for a while."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from support.pools.dashboards import TOKEN, applied, dashboard
from support.pools.late import publish, publisher
from support.pools.planted_faults import damage, newest
from support.pools.pool import eventually, status, worker
from support.pools.standstills import TABLE, Make, Scene, needs, paused, redis_memory, weights_lost_by_a_dead_trainer
from support.redis.roles import create, refusals
from support.specimens.messages import tokens

from rolloutmq import RolloutClient
from rolloutmq.messages import Broker, Lease, connect
from rolloutmq.ops.redis.embedded import EmbeddedRedis
from rolloutmq.worker.scripted.engine import ScriptedEngine


def known(state: dict[str, Any]) -> dict[str, Any]:
    """Without what is missing on one side and null on the other."""
    return {name: known(it) if isinstance(it, dict) else it for name, it in state.items() if it is not None}


async def test_a_browser_gets_a_snapshot_and_then_what_changes(redis_db: str) -> None:
    async with dashboard(redis_db) as page, page.events() as events:
        kind, state = await anext(events)
        assert kind == "snapshot"
        async with worker(redis_db) as running:
            while running.id not in state.get("workers", {}):
                kind, tick = await anext(events)
                assert kind == "tick"
                state = applied(state, tick["patch"])
            assert running.id in tick["spans"]
            told = await page.until(lambda it: it["workers"][running.id]["state"] == "serving")
            assert told["lanes"][running.id]["spans"][-1][1:] == [None, 0, "serving"]
            assert [one[1] for one in told["lanes"][running.id]["ticks"]] == ["join"]
            while state["workers"][running.id]["state"] != "serving":
                state = applied(state, (await anext(events))[1]["patch"])
            assert known(state["workers"]).keys() == known(told["workers"]).keys()
        while state["workers"]:
            state = applied(state, (await anext(events))[1]["patch"])
        assert "leave" in [one[1] for one in (await page.state())["lanes"][running.id]["ticks"]]


async def test_many_browsers_cost_one_reader(redis_db: str) -> None:
    async with dashboard(redis_db) as page, worker(redis_db):
        await page.until(lambda state: state["workers"])

        async def watch() -> list[int]:
            async with page.events() as events:
                found = [await anext(events) for _ in range(4)]
            return [tick["points"]["at"] for kind, tick in found if kind == "tick"]

        before = page.live.looks
        seen = await asyncio.gather(*(watch() for _ in range(40)))
        assert {len(it) for it in seen} == {3}
        assert page.live.looks - before <= 3 * 4
        assert len({at for it in seen for at in it}) <= 12
        await eventually(lambda: page.live.hub.viewers == 0)


async def test_who_is_slow_gets_the_whole_state_and_holds_up_nobody(redis_db: str) -> None:
    async with dashboard(redis_db) as page:
        slow, quick = page.live.hub.events(), page.live.hub.events()
        await page.until(lambda _: True)
        assert (await anext(slow)).startswith(b"event: snapshot")
        assert (await anext(quick)).startswith(b"event: snapshot")
        for number in range(1000):
            page.live.hub.send({"patch": {"number": number}})
            assert b'"number":%d}' % number in await anext(quick)
        assert (await anext(slow)).startswith(b"event: snapshot"), "what waited for it is dropped"
        page.live.hub.send({"patch": {"number": -1}})
        assert b'"number":-1}' in await anext(slow)
        await slow.aclose()
        await quick.aclose()
        assert page.live.hub.viewers == 0


async def test_the_flow_and_the_verdict_follow_the_pool(redis_db: str, client: RolloutClient) -> None:
    async with dashboard(redis_db) as page:
        await client.submit(tokens())
        state = await page.until(lambda it: it["flow"]["queued"] == 1)
        assert state["verdict"]["state"] == "standing"
        assert "no worker" in state["verdict"]["title"]
        assert state["flow"]["ages"]["normal"]["n"] == 1
        assert state["flow"]["ages"]["normal"]["p50"] is not None
        async with worker(redis_db, engine=ScriptedEngine(tokens_per_s=1e6)):
            state = await page.until(lambda it: it["flow"]["done"] == 1)
            assert state["flow"]["queued"] == 0
            series = state["series"]
            assert {len(values) for values in series.values()} == {len(series["at"])}
            assert series["queued"][0] in {0, 1, None}


async def test_a_silent_redis_is_told_and_the_reader_goes_on(redis_server: EmbeddedRedis, redis_url: str) -> None:
    async with dashboard(redis_url) as page, page.events() as events:
        await page.until(lambda state: not state["silent_s"])
        os.kill(redis_server.pid, signal.SIGSTOP)
        try:
            state: dict[str, Any] = {}
            while (state.get("silent_s") or 0) <= 3:
                state = applied(state, (await anext(events))[1].get("patch", {}))
            assert state["verdict"]["state"] == "broken"
        finally:
            os.kill(redis_server.pid, signal.SIGCONT)
        await page.until(lambda state: not state["silent_s"] and state["verdict"]["state"] != "broken")


@pytest.mark.parametrize(
    "make", [pytest.param(needs, marks=pytest.mark.one_shard), paused, weights_lost_by_a_dead_trainer, redis_memory]
)
async def test_a_standstill_is_in_the_verdict_and_the_alarms(
    make: Make, redis_db: str, db: Redis, client: RolloutClient
) -> None:
    """Those of the diagnosis, whatever they are; tests/producer/diagnosis makes them all."""
    cause = next(cause for cause, its in TABLE if its is make)
    async with AsyncExitStack() as stack, dashboard(redis_db) as page:
        await make(Scene(redis_db, db, client, stack))
        state = await page.until(lambda it: named(it, cause), what=cause)
        alarm = named(state, cause)
        assert alarm is not None
        assert alarm["severity"] == "error"
        assert alarm["text"]
        assert alarm["doc"] == "docs/troubleshooting.md#why-does-my-job-not-run"
        assert state["verdict"]["state"] in {"standing", "broken"}
        assert state["verdict"]["todo"]


def named(state: dict[str, Any], cause: str) -> dict[str, Any] | None:
    """The alarm of a cause why jobs do not run."""
    return next((alarm for alarm in state["alarms"] if alarm["id"] == f"why-{cause}"), None)


async def test_a_worker_that_dies_is_an_alarm_and_its_lane_ends(redis_db: str) -> None:
    async with dashboard(redis_db) as page, worker(redis_db):
        async with worker(redis_db) as running:
            await page.until(lambda state: running.id in state["workers"])
            await running.die()
            state = await page.until(lambda it: it["alarms"])
        assert state["alarms"][0]["id"] == "workers-die"
        assert running.id in state["alarms"][0]["evidence"]
        lane = state["lanes"][running.id]
        assert "death" in [one[1] for one in lane["ticks"]]
        await eventually(lambda: page.live.looks)


async def test_a_damaged_snapshot_is_an_alarm_though_its_worker_serves(redis_db: str, tmp_path: Path) -> None:
    async with worker(redis_db) as early, publisher(redis_db, snapshots=tmp_path) as source:
        assert (await publish(source, 1)).state == "committed"
        await eventually(lambda: newest(tmp_path).name.endswith("1"))
        damage(tmp_path)
        async with dashboard(redis_db) as page, worker(redis_db, snapshots=str(tmp_path)) as late:
            state = await page.until(lambda it: [one for one in it["alarms"] if one["id"] == "snapshot-broken"])
            assert early.id not in state["alarms"][0]["evidence"]
            assert f"{late.id} at version 1: the snapshot of version 1 in" in state["alarms"][0]["evidence"]
            assert "digest" in state["alarms"][0]["evidence"]
            assert state["workers"][late.id]["state"] == "serving"
            assert "fault" in [it[1] for it in state["lanes"][late.id]["ticks"]]
            await publish(source, 2)
            await page.until(lambda it: not [one for one in it["alarms"] if one["id"] == "snapshot-broken"])


async def test_a_trainers_journal_adds_rewards_and_what_was_consumed(redis_db: str, tmp_path: Path) -> None:
    async with (
        worker(redis_db, engine=ScriptedEngine(tokens_per_s=1e6)),
        RolloutClient(redis_db, journal=tmp_path) as trainer,
        dashboard(redis_db, journal=str(tmp_path)) as page,
    ):
        assert trainer.journal is not None
        for _ in range(4):
            (result,) = await trainer.wait(await trainer.submit(tokens()), 30)
            trainer.journal.note(result, reward=0.5)
        await asyncio.to_thread(trainer.journal.flush, 30)
        state = await page.until(lambda it: it["flow"]["consumed"] == 4 and it["versions"])
        assert state["versions"]["0"]["reward"] == 0.5
        assert state["staleness"] == {"0": 4}
        rows = (await page.http.get("/rollouts")).json()["rows"]
        assert {row["reward"] for row in rows} == {0.5}
        shown = (await page.http.get(f"/rollout/{rows[0]['job_id']}")).json()
        assert len(shown["tokens"]) == rows[0]["tokens"]


@pytest.mark.one_shard
async def test_an_operators_rights_are_enough(redis_server: EmbeddedRedis) -> None:
    """Those of docs/redis.md: to look, and to requeue."""
    async with connect(redis_server.url, pool="mine") as admin:
        broker = Broker(admin, "mine")
        lease = Lease(admin, "mine", "w", 30.0)
        await lease.join(status("w"))
        await broker.enqueue([tokens(reply_to="someone")])
        (claim,) = await lease.claim(1, 8, 0)
        await lease.bury(claim.job_id, claim.attempt, "broken", "host", "why")
        async with dashboard(create(redis_server, "operator", "mine"), TOKEN, pool="mine") as page:
            state = await page.until(lambda it: it["failures"] and it["workers"])
            (await page.http.get("/rollouts")).raise_for_status()
            headers = {"authorization": f"Bearer {TOKEN}"}
            answer = await page.http.post("/requeue", json={"cause": state["failures"][0]["id"]}, headers=headers)
            assert answer.json()["requeued"] == 1
            await page.until(lambda it: it["flow"]["queued"] == 1)
        assert await refusals(admin) == []
