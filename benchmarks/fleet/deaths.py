"""What a death costs those that live: from `publish` until every survivor has the version, verified."""

from __future__ import annotations

import signal
import time
from typing import Any

from .pool import Fleet, Worker, middle, p, send

EVERY_S = 0.25
STILL, AFTER = 8, 4
SURVIVORS = 6
MOMENTS = ("before", "at", "in", "after")
LONGEST_S = 90.0


def measure(lease_s: float, model: str = "") -> list[dict[str, Any]]:
    """All faults at all moments, with leases of `lease_s`. model: the folder for SGLang; scripted engines without."""
    faults = ("kill", "stop", "cut") if not model else ("stop group", "stop scheduler", "kill scheduler")
    found = []
    with Fleet(model) as fleet:
        survivors = fleet.start(SURVIVORS if not model else 2, lease_s=lease_s)
        for fault in faults:
            for moment in MOMENTS:
                (victim,) = fleet.start(1, lease_s=lease_s)
                found.append({"lease_s": lease_s, "engine": "sglang" if model else "scripted"})
                found[-1] |= _case(fleet, survivors, victim, fault, moment)
                victim.end()
                fleet.workers.remove(victim)
                _forget(fleet, victim)
    return found


def _forget(fleet: Fleet, victim: Worker) -> None:
    """Until its lease is over the ledger counts it as alive: not a part of the next case."""
    for worker in victim.ids:
        fleet.admin.zadd("rmq:{fleet}:workers", {worker: 1}, xx=True)
    time.sleep(1.0)


def _case(fleet: Fleet, survivors: list[Worker], victim: Worker, fault: str, moment: str) -> dict[str, Any]:
    living = [worker for one in survivors for worker in one.ids]
    still: list[float] = []
    for _ in range(STILL):
        version, began, _ = fleet.publish()
        if not fleet.watch.wait(version, [*living, *victim.ids], LONGEST_S):
            raise SystemExit(f"version {version} did not come to all, with nothing broken")
        still += fleet.watch.delays(version, began, living)
        time.sleep(EVERY_S)
    usual = sorted(still)[len(still) // 2]
    handles, delays, below = [], list[float](), len(fleet.below(victim.ids[0], deep=False))
    if moment == "before":
        _break(victim, fault)
        time.sleep(0.05)
    for number in range(AFTER):
        version, began, handle = fleet.publish()
        handles.append(handle)
        if number == 0 and moment == "at":
            _break(victim, fault)
        if number == 0 and moment == "in":
            time.sleep(max(0.0, began + usual / 2 - time.time()))
            below = len(fleet.below(victim.ids[0], deep=False))
            _break(victim, fault)
        if number == 0 and moment == "after":
            fleet.watch.wait(version, victim.ids, LONGEST_S)
            _break(victim, fault)
        if not fleet.watch.wait(version, living, LONGEST_S):
            raise SystemExit(f"{fault} {moment}: version {version} did not come to the survivors")
        delays += fleet.watch.delays(version, began, living)
        time.sleep(EVERY_S)
    for process in victim.family():
        send(process, signal.SIGCONT)
    blamed = set().union(*(handle.wait(LONGEST_S).failures for handle in handles)) & set(living)
    return {
        "fault": fault,
        "moment": moment,
        "still_ms": middle(still),
        "still_max_ms": p(still, 1.0),
        "beyond_ms": round(p(delays, 1.0) - p(still, 1.0), 1),
        "median_ms": middle(delays),
        "behind_the_victim": below,
        "innocent_reported": sorted(blamed),
    }


def _break(victim: Worker, fault: str) -> None:
    own, how = victim.family(), fault.split(maxsplit=1)[0]
    if how == "cut":
        victim.pipe.send("cut")
    elif fault.endswith("scheduler"):
        send(victim.scheduler(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
    else:
        for process in own if fault.endswith("group") else own[:1]:
            send(process, signal.SIGKILL if how == "kill" else signal.SIGSTOP)
