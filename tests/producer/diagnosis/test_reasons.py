"""From a reading to reasons, with readings that are made up."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from support.pools.pool import status

from rolloutmq.messages import WorkerStatus
from rolloutmq.messages.broker import PoolLoad, Waiting
from rolloutmq.producer.diagnosis import CAUSES, Held, PoolReading, Reason, Refused, reasons

NOW = 1_000_000.0


def reading(*workers: WorkerStatus, silent: tuple[str, ...] = (), jobs: int = 1, **more: Any) -> PoolReading:
    """A pool in which so many jobs are open. silent: workers whose leases ran out 7 s ago."""
    counts = {it.name: 0 for it in fields(PoolLoad) if it.name != "queued"}
    load = PoolLoad(queued=(0, jobs, 0), **counts | {"open_jobs": jobs} | more.pop("load", {}))
    ends = {it.worker_id: NOW + 5 for it in workers} | dict.fromkeys(silent, NOW - 7)
    settled = {"pool": "p", "at": NOW, "ready": jobs, "workers": workers, "lease_ends": ends}
    return PoolReading(load=load, **settled | more)


def paused(**more: Any) -> WorkerStatus:
    told = {"state": "paused", "blocks": ("pause",), "why": "pause abort by u@h", "state_since": NOW - 60}
    return status("w1", **told | more)


BEHIND = {"state": "syncing", "blocks": ("unavailable",), "why": "nobody offers it", "startup": {"weights": 1.0}}
STANDSTILLS: dict[str, PoolReading] = {
    "shard-away": reading(status("w1"), shards_away={1: "refused"}),
    "redis-memory": reading(status("w1"), memory=99 << 20, memory_limit=100 << 20),
    "redis-refuses": reading(silent=("w1",), refuses={0: "Redis takes no writes: MISCONF."}),
    "pool-full": reading(status("w1"), refused=Refused("jobs", "c", 1.0)),
    "client-full": reading(status("w1"), refused=Refused("unread", "c", 1.0)),
    "weights-lost": reading(status("w1", **BEHIND), committed=7, offered_by=frozenset({""})),
    "restart-loop": reading(status("w1", restarts_in_a_row=2)),
    "no-worker": reading(silent=("w1",)),
    "starting": reading(status("w1", state="syncing", blocks=("version",), startup={"process": 1.0})),
    "engine-down": reading(status("w1", state="quarantined", blocks=("dead",))),
    "quarantined": reading(status("w1", state="syncing", blocks=("quarantine",))),
    "draining": reading(status("w1", state="draining")),
    "asleep": reading(paused(blocks=("asleep",))),
    "stale-weights": reading(paused(blocks=("stale",))),
    "paused": reading(paused()),
    "behind": reading(status("w1", version=3), committed=7, behind=Held(1, 7), offered_by=frozenset({""})),
    "task": reading(status("w1"), needs=(Waiting(("task:score",), 2, False),)),
    "needs": reading(status("w1"), needs=(Waiting(("generate", "seed"), 2, False),)),
    "context": reading(status("w1"), needs=(Waiting(("generate",), 2, True, 4096, 1),)),
    "adapter": reading(status("w1"), adapters=(Held(1, 3, "math"),), adapters_at={"math": 2}),
    "version-ahead": reading(status("w1", version=3), committed=3, ahead=Held(2, 9)),
    "exact-version": reading(status("w1", version=3), committed=3, exact={2: 4}),
    "staleness": reading(
        status("w1", version=3), committed=7, behind=Held(1, 7, by_staleness=True), offered_by=frozenset({""})
    ),
    "suspect": reading(status("w1", max_running=8), alone={"w1": "a" * 32}),
    "unclaimed": reading(status("w1", max_running=8), unclaimed=True, oldest_at=NOW - 9),
    "preferred": reading(status("w1"), ready=0, preferring=1),
    "slow": reading(status("w1", held=1), oldest_at=NOW - 30),
}


def test_every_cause_is_made_up_here() -> None:
    assert ("redis-away", *STANDSTILLS) == CAUSES, "of a Redis that is away there is no reading"


@pytest.mark.parametrize("cause", STANDSTILLS)
def test_a_reading_has_its_cause_first(cause: str) -> None:
    first = reasons(STANDSTILLS[cause])[0]
    assert (first.cause, first.stops) == (cause, True)
    assert first.found
    assert first.do.endswith(".")


def test_what_is_told_says_who_did_it_since_when_and_what_to_do() -> None:
    (reason,) = reasons(reading(paused()))
    assert reason.told(NOW) == "paused: w1 is paused (pause abort by u@h), for 60 s. `rolloutmq control resume`."


def test_one_worker_that_serves_is_enough() -> None:
    assert [it.cause for it in reasons(reading(paused(), status("w2", held=1)))] == ["slow"]
    suspects: dict[str, Any] = {"load": {"suspects": 2}, "alone": {"w1": "a"}}
    assert [it.cause for it in reasons(reading(status("w1"), status("w2", held=1), **suspects))] == ["slow"]


def test_a_pool_without_jobs_has_only_faults() -> None:
    assert reasons(reading(jobs=0)) == reasons(reading(paused(), jobs=0)) == []
    lost = reading(status("w1", **BEHIND), committed=7, jobs=0)
    assert [(it.cause, it.stops) for it in reasons(lost)] == [("weights-lost", False)]


@pytest.mark.parametrize(
    "known",
    [
        {"offered_by": frozenset({"w2"})},  # a worker, of which nobody knows that it would not give them
        {"transfer": 4},
        {"offered_by": frozenset({""})},
    ],
)
def test_weights_that_may_still_come_are_not_lost(known: dict[str, Any]) -> None:
    told = {"state": "syncing", "blocks": ("version",), "startup": {"weights": 1.0}}
    found = reasons(reading(status("w1", **told), status("w2", **told), committed=7, **known))
    assert [it.cause for it in found] == ["behind"]


def test_weights_that_only_a_worker_without_lease_offers_are_lost() -> None:
    found = reasons(reading(silent=("w1",), committed=7, offered_by=frozenset({"w1"})))
    assert [it.cause for it in found] == ["weights-lost", "no-worker"], "starting a worker would not help"


def test_jobs_for_some_workers_wait_for_these() -> None:
    waits = (Waiting(("generate", "seed"), 2, True, 4096),)
    (reason,) = reasons(reading(paused(features=("seed",)), status("w2"), ready=0, needs=waits))
    assert reason.cause == "paused"
    assert reason.found.startswith("2 jobs wait for seed: w1 is paused")


def test_a_worker_that_loads_its_engine_is_no_worker_yet() -> None:
    (reason,) = reasons(reading(starting={"h-7": NOW - 20.0}, start_s=45.0))
    assert reason.told(NOW).startswith(
        "starting: h-7 loads its engine, and is not in the pool yet; the last start took 45 s, for 20 s."
    )


@pytest.mark.parametrize(
    ("known", "told"),
    [
        ({"load": {"suspects": 2}}, "suspect: 2 jobs wait for a last chance: a worker runs them"),
        ({"unreached": (1,)}, "shard-away: no worker reaches shard 1 of the pool"),
        ({"needs": (Waiting(("exact_version", "generate", "seed", "version=4"), 2, True),)}, "exact-version: 2 jobs"),
        ({"ready": 0}, "slow: 1 jobs wait behind 0 samples in 1 slots, at 0 tokens/s. None runs; see one"),
        ({"jobs": 0, "tenants": {"a": NOW - 99, "b": NOW - 1}}, "paused: new requests of a wait at the gateways"),
    ],
)
def test_what_waits_beside_a_worker_that_serves(known: dict[str, Any], told: str) -> None:
    (reason,) = reasons(reading(status("w1", version=3, features=("exact_version", "seed")), **known))
    assert reason.told(NOW).startswith(told)


def test_a_paused_tenant_hides_no_pause_that_jobs_wait_for_nor_that_work_is_slow() -> None:
    tenants, behind = {"a": NOW - 99}, Held(2, 3)
    found = reasons(reading(status("w1", held=1), paused(version=3), tenants=tenants, behind=behind))
    assert [(it.cause, it.stops) for it in found] == [("paused", True)]
    found = reasons(reading(status("w1", held=1), tenants=tenants))
    assert [(it.cause, it.stops) for it in found] == [("slow", True), ("paused", False)]


def test_a_worker_that_keeps_its_version_does_not_hide_that_the_pools_is_lost() -> None:
    found = reasons(reading(status("w1", **BEHIND), status("w2", hold_version=3, version=3), committed=7, jobs=0))
    assert [it.cause for it in found] == ["weights-lost"]


def test_slow_work_is_measured() -> None:
    fast = status("w1", held=4, max_running=4, tokens_per_s=50.0, finished_samples=10, generated_tokens=1000)
    (reason,) = reasons(reading(fast, jobs=6))
    assert reason == Reason(
        "slow",
        "6 jobs wait behind 4 samples in 4 slots, at 50 tokens/s: about 20 s of work, if samples are as before",
        "Nothing is wrong. More workers would do it sooner.",
    )
