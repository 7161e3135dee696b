"""A fleet of 128 workers of which at every version one dies unannounced and one joins, beside one left alone."""

from __future__ import annotations

import signal
import threading
import time
from typing import Any

from .pool import Fleet, Worker, middle, p, send

STANDING, IN_ONE = 112, 16
CHURNING = 16
EVERY_S = 1.5
SMALL = {"buckets": 1, "nbytes": 4096}
LONGEST_S = 60.0


def measure(versions: int) -> dict[str, Any]:
    """The first publication, `versions` of a still fleet, and as many with a death and a join at each."""
    with Fleet() as fleet:
        standing = fleet.start(STANDING // IN_ONE, count=IN_ONE, lease_s=60.0)
        churning = fleet.start(CHURNING, lease_s=60.0)
        living = [worker for one in (*standing, *churning) for worker in one.ids]
        first = _one(fleet, living)
        for _ in range(3):
            _one(fleet, living)
        idle_s, idle_beats = _redis(fleet, 4 * EVERY_S)
        cpu, still = fleet.cpu_s(), list[float]()
        for _ in range(versions):
            still += _one(fleet, living)
        publication_s = (fleet.cpu_s() - cpu) / versions - idle_s * EVERY_S
        beat_s = idle_s / idle_beats
        outside, behind, joins = list[float](), list[float](), list[float]()
        for _ in range(versions):
            victim, new = churning.pop(0), Worker(fleet.url, lease_s=60.0)
            fleet.workers.append(new)
            joining = threading.Thread(target=new.up)
            joining.start()
            victims = fleet.below(victim.ids[0])
            send(victim.family()[0], signal.SIGKILL)
            living = [worker for worker in living if worker not in victim.ids]
            version, began, _ = fleet.publish(**SMALL)
            if not fleet.watch.wait(version, living, LONGEST_S):
                raise SystemExit(f"version {version} did not come to the survivors")
            victims |= fleet.below(victim.ids[0])
            outside += fleet.watch.delays(version, began, [one for one in living if one not in victims])
            behind += fleet.watch.delays(version, began, [one for one in living if one in victims])
            joining.join()
            joins += _joined(fleet, new)
            living += new.ids
            churning.append(new)
            victim.process.join()
            time.sleep(max(0.0, began + EVERY_S - time.time()))
    return {
        "workers": STANDING + CHURNING,
        "versions": versions,
        "first_publication_ms": p(first, 1.0),
        "still_ms": {"p50": middle(still), "p99": p(still, 0.99)},
        "churning_ms": {"p50": middle(outside), "p99": p(outside, 0.99)},
        "p99_of_still": round(p(outside, 0.99) / p(still, 0.99), 3),
        "behind_a_victim_ms": {"count": len(behind), "worst": p(behind, 1.0)},
        "joiner_has_it_ms": {"p50": middle(joins), "worst": p(joins, 1.0)},
        "redis_ms_per_publication": round(1000 * publication_s, 2),
        "redis_us_per_heartbeat": round(1e6 * beat_s, 1),
        "redis_allowed_ms": round(1.0 + 2000 * beat_s * (STANDING + CHURNING), 2),
    }


def _one(fleet: Fleet, living: list[str]) -> list[float]:
    version, began, _ = fleet.publish(**SMALL)
    if not fleet.watch.wait(version, living, LONGEST_S):
        raise SystemExit(f"version {version} did not come to all")
    time.sleep(max(0.0, began + EVERY_S - time.time()))
    return fleet.watch.delays(version, began, living)


def _redis(fleet: Fleet, seconds: float) -> tuple[float, float]:
    """CPU of Redis a second, and heartbeats a second, of a pool that does nothing."""
    fleet.admin.config_resetstat()
    cpu, began = fleet.cpu_s(), time.monotonic()
    time.sleep(seconds)
    took, spent = time.monotonic() - began, fleet.cpu_s() - cpu
    beats: int = fleet.admin.info("commandstats")["cmdstat_zadd"]["calls"]  # each heartbeat renews one lease
    return spent / took, beats / took


def _joined(fleet: Fleet, new: Worker) -> list[float]:
    """Seconds from the join until it says that it has the newest version."""
    began = time.time()
    until = began + LONGEST_S
    while time.time() < until:
        held = fleet.admin.hget("rmq:{fleet}:holders", new.ids[0])
        if held is not None:
            return [time.time() - began]
        time.sleep(0.005)
    raise SystemExit("a worker that joined did not get the newest version")
