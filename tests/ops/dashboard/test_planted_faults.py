"""A run with four faults in it: each is an alarm with its cause, on the page and in the report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.pools.planted_faults import DEATHS, FLIPPED, Planted, run_with_faults

from rolloutmq.ops.dashboard import load, report_of


def alarm(state: dict[str, Any], kind: str) -> dict[str, Any]:
    (found,) = [one for one in state["alarms"] if one["id"] == kind]
    return dict(found)


def check_run(run: Planted) -> None:
    history = load(str(run.journal))
    state = history.state()
    assert f"up to version {FLIPPED}" in alarm(state, "reward-fell")["evidence"]
    assert alarm(state, "reward-fell")["title"] == "The reward changed its sign"
    assert run.late in alarm(state, "snapshot-broken")["evidence"]
    dying = alarm(state, "workers-die")
    assert (dying["title"], dying["severity"]) == ("Workers die again and again", "error")
    assert f"{DEATHS} on " in dying["evidence"]
    asks = alarm(state, "never-claimed")["evidence"]
    assert f"{len(run.asking)} jobs that ask for seed" in asks
    assert {one["worker"] for one in report_of(history).data["deaths"]} >= set(run.dead)


async def test_each_planted_fault_is_found(redis_db: str, tmp_path: Path) -> None:
    check_run(await run_with_faults(redis_db, tmp_path))
