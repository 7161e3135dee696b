"""States of pools as the dashboard's page gets them: quiet, at fault, large, hostile; and what changes in a second.

Everything is made from a seed and a fixed time, so a screenshot and a failure can be had again.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Iterator
from typing import Any

NOW = 1_795_867_200.0
WINDOW_S = 900
HOSTILE = (
    '<img src=x onerror="window.broken = 1"><script>window.broken = 1</script>',
    "\u202egnp.exe\x00\x1b[31m",
    "</script><script>window.broken = 1</script>",
    "__proto__",
    "'); window.broken = 1; //",
    "x" * 3000,
)

Json = dict[str, Any]


def quiet(workers: int = 8, seed: int = 1) -> Json:
    """A pool in which all is well: `workers` workers, a publish every two minutes."""
    rng = random.Random(seed)
    publishes = [(NOW - WINDOW_S + 40 + 120 * at, 41 + at) for at in range(8)]
    ids = [f"gpu-{at // 8:02}-{at % 8}" for at in range(workers)]
    lanes = {name: _lane(rng, publishes) for name in ids}
    facts = {name: _worker(rng, name, publishes[-1][1]) for name in ids}
    return {
        "at": NOW,
        "pool": "default",
        "mode": "live",
        "can_act": True,
        "began": NOW - 6 * 3600,
        "ended": None,
        "silent_s": 0.0,
        "verdict": {
            "state": "healthy",
            "since": NOW - 5400,
            "title": "Workers and trainer keep pace",
            "why": [
                f"{workers} of {workers} workers serve version {publishes[-1][1]}",
                "the trainer waits 2 % of its time",
            ],
            "todo": [],
        },
        "workers": facts,
        "lanes": lanes,
        "publishes": [[at, version, "ok", ""] for at, version in publishes],
        "staleness": {"0": 5210, "1": 2904, "2": 411, "3": 22},
        "flow": {
            "queued": 320,
            "running": 40 * workers,
            "done": 48_210,
            "consumed": 47_600,
            "failed": 0,
            "ages": {
                "high": {"p50": 0.4, "p95": 1.9, "n": 12},
                "normal": {"p50": 6.1, "p95": 14.8, "n": 300},
                "low": {"p50": None, "p95": None, "n": 0},
            },
            "tokens_per_s": 1150.0 * workers,
            "trainer_waits": 0.021,
        },
        "versions": _versions(rng, publishes[-1][1]),
        "failures": [],
        "alarms": [],
        "series": _series(rng, workers),
    }


def faults() -> Json:
    """Four faults at once: a reward whose sign flipped, a corrupted snapshot, a dying worker, jobs nobody can do."""
    state = quiet(16)
    newest = state["publishes"][-1][1]
    dying = state["lanes"]["gpu-01-3"] = {"spans": [], "ticks": []}
    for at in range(15):
        begun = NOW - WINDOW_S + 60 * at
        dying["spans"] += [[begun, begun + 42, newest - 1, "serving"], [begun + 42, begun + 60, None, "dead"]]
        dying["ticks"] += [
            [begun, "join", None, "attempt " + str(at)],
            [begun + 42, "death", newest - 1, "exit status 139"],
        ]
    state["lanes"]["gpu-00-6"]["spans"][-1] = [NOW - 55, None, newest, "updating"]
    leaves = [span for span in state["lanes"]["gpu-01-6"]["spans"] if span[0] < NOW - 200]
    leaves[-1][1] = NOW - 200
    state["lanes"]["gpu-01-6"]["spans"] = [*leaves, [NOW - 200, None, newest - 2, "draining"]]
    state["lanes"]["gpu-01-6"]["ticks"] = [it for it in state["lanes"]["gpu-01-6"]["ticks"] if it[0] < NOW - 200]
    state["lanes"]["gpu-00-2"]["ticks"].append([NOW - 310, "stall", newest - 2, "no token for 31 s"])
    for name in ("gpu-00-1", "gpu-00-5"):
        state["lanes"][name]["ticks"].append(
            [NOW - 95, "fault", newest, "digest of snapshot 49 is not the published one"]
        )
    state["publishes"].append([NOW - 95, newest + 1, "failed", "digest differs"])
    state["workers"]["gpu-01-3"] |= {"alive": False, "state": "dead", "restarts": 15, "running": 0, "tokens_per_s": 0.0}
    state["workers"]["gpu-00-6"]["state"] = "updating"
    state["workers"]["gpu-01-6"] |= {"state": "draining", "version": newest - 2}
    for version in range(newest - 5, newest + 1):
        state["versions"][str(version)]["reward"] = -0.4 - 0.02 * (version - newest)
    state["verdict"] = {
        "state": "broken",
        "since": NOW - 95,
        "title": f"Version {newest + 1} cannot be loaded: its snapshot is not what was published",
        "why": ["2 workers refused it: digest of shard 3 differs", f"the pool still serves version {newest}"],
        "todo": ["Publish again: rolloutmq weights publish", "Look at the disk that the snapshot was read from"],
    }
    state["failures"] = _failures()
    state["alarms"] = _alarms()
    state["flow"] |= {"failed": 1294, "trainer_waits": 0.31, "queued": 2140}
    return state


def large(workers: int = 1000, jobs: int = 100_000) -> Json:
    """As many lanes as a fleet has, and as many jobs."""
    state = quiet(workers)
    state["flow"] |= {
        "queued": jobs // 2,
        "running": jobs // 2,
        "done": 9_120_455,
        "consumed": 9_055_110,
        "failed": 812,
    }
    state["failures"] = [_failure(f"cause {at} of <n>", 4 * (at + 1)) for at in range(200)]
    return state


def hostile() -> Json:
    """Every text is what an attacker would have written, and numbers are missing or without bounds."""
    state = quiet(2)
    for at, text in enumerate(HOSTILE):
        state["workers"][text] = {
            "state": text,
            "version": None if at % 2 else 2**60,
            "alive": True,
            "host": text,
            "running": None,
            "max_running": None,
            "tokens_per_s": 1e300,
            "restarts": -1,
        }
        state["lanes"][text] = {
            "spans": [[NOW - 500, NOW - 400, None, text], [NOW - 400, None, 10**9, "serving"]],
            "ticks": [[NOW - 400, text, None, text], [NOW - 1e9, "death", -3, text]],
        }
        state["failures"].append(_failure(text, at + 1))
        state["alarms"].append(_alarm(str(at), "error", text) | {"evidence": text, "text": text, "doc": text})
    state["verdict"] = {"state": HOSTILE[0], "since": None, "title": HOSTILE[0], "why": [*HOSTILE], "todo": [*HOSTILE]}
    state["pool"] = HOSTILE[1]
    state["flow"] = {}
    state["series"] = {"at": []}
    state["versions"] = {"__proto__": {"samples": 1}, "1": {"reward": None}}
    return state


def finished() -> tuple[Json, list[Json]]:
    """A run of six hours from its journal: the state of its end, and as it was at 100 times."""
    end = faults()
    began, ended = NOW - 6 * 3600, NOW
    end |= {"mode": "journal", "can_act": False, "began": began, "ended": ended}
    for name, scale in (("lanes", 24), ("publishes", 24), ("series", 24)):
        end[name] = _stretched(end[name], scale)
    frames = []
    for at in range(100):
        now = began + (ended - began) * at / 99
        share = at / 99
        flow = end["flow"] | {"done": int(48_210 * share), "consumed": int(47_600 * share), "failed": int(1294 * share)}
        frame = {name: value for name, value in end.items() if name not in ("lanes", "series", "publishes")}
        calm = {"state": "healthy", "since": began, "title": "Workers and trainer keep pace", "why": [], "todo": []}
        rest = {} if share > 0.9 else {"verdict": calm, "failures": [], "alarms": []}
        frames.append(frame | {"at": now, "flow": flow} | rest)
    return end, frames


def ticks(state: Json, seed: int = 3) -> Iterator[Json]:
    """What changes of this state, second by second, without end: figures of every worker, and a sync now and then."""
    rng = random.Random(seed)
    names, at = list(state["workers"]), state["at"]
    newest = state["publishes"][-1][1]
    for second in range(10**9):
        at += 1
        facts = {name: {"running": rng.randrange(64), "tokens_per_s": 900 + 500 * rng.random()} for name in names}
        synced = rng.sample(names, max(1, len(names) // 20))
        flow = {
            "queued": 300 + second % 90,
            "running": 300 + second % 40,
            "done": state["flow"].get("done", 0) + 9 * second,
        }
        yield {
            "patch": {"at": at, "workers": facts, "flow": flow},
            "points": {
                "queued": flow["queued"],
                "running": flow["running"],
                "done": flow["done"],
                "consumed": flow["done"] - 500,
                "tokens_per_s": 1000.0 * len(names),
                "serving": len(names),
                "age_p95": 9.0,
            },
            "spans": {name: [[at, None, newest + 1 + second // 60, "serving"]] for name in synced},
            "ticks": {name: [[at, "sync", newest + 1 + second // 60, "digest ok"]] for name in synced},
            "gone": [],
        }


def _lane(rng: random.Random, publishes: list[tuple[float, int]]) -> Json:
    """A worker that serves each version from seconds after its publish on."""
    spans: list[list[Any]] = [[NOW - WINDOW_S, None, publishes[0][1] - 1, "serving"]]
    marks: list[list[Any]] = []
    for published, version in publishes:
        begun = published + rng.uniform(1, 14)
        ready = begun + rng.uniform(3, 7)
        spans[-1][1] = begun
        spans += [[begun, ready, version - 1, "updating"], [ready, None, version, "serving"]]
        marks.append([ready, "sync", version, "digest ok"])
    return {"spans": spans, "ticks": marks}


def _worker(rng: random.Random, name: str, version: int) -> Json:
    return {
        "state": "serving",
        "version": version,
        "alive": True,
        "host": name.rpartition("-")[0],
        "running": rng.randrange(30, 60),
        "max_running": 64,
        "tokens_per_s": rng.uniform(900, 1400),
        "restarts": 0,
    }


def _versions(rng: random.Random, newest: int) -> Json:
    return {
        str(version): {
            "samples": rng.randrange(400, 1100),
            "reward": round(0.1 + 0.5 * (1 - math.exp(-version / 18)) + rng.uniform(-0.03, 0.03), 4),
            "staleness": round(rng.uniform(0.1, 1.2), 3),
            "tokens": rng.randrange(10**5, 10**6),
            "at": NOW - 120 * (newest - version),
        }
        for version in range(1, newest + 1)
    }


def _series(rng: random.Random, workers: int) -> Json:
    made: Json = {
        name: [] for name in ("at", "queued", "running", "done", "consumed", "tokens_per_s", "serving", "age_p95")
    }
    done = 40_000.0
    for second in range(WINDOW_S):
        done += 9 + 3 * math.sin(second / 40)
        made["at"].append(NOW - WINDOW_S + second + 1)
        made["queued"].append(int(320 + 180 * math.sin(second / 55) + rng.uniform(-9, 9)))
        made["running"].append(int(40 * workers + 30 * math.sin(second / 20)))
        made["done"].append(int(done))
        made["consumed"].append(int(done // 512 * 512) - 100)
        made["tokens_per_s"].append(1150.0 * workers * (1 + 0.1 * math.sin(second / 30)) + rng.uniform(-200, 200))
        made["serving"].append(workers - (second % 120 < 6) * min(workers, 3))
        made["age_p95"].append(None if second < 60 else round(12 + 6 * math.sin(second / 55), 2))
    return made


def _failure(cause: str, number: int) -> Json:
    return {
        "id": hashlib.sha256(f"{number} {cause}".encode()).hexdigest()[:12],
        "cause": cause,
        "example": f"Traceback (most recent call last):\n  …\n{cause}",
        "count": number,
        "first": NOW - 4000,
        "last": NOW - 20,
        "jobs": [f"0199f3c2-000{at}" for at in range(min(5, number))],
        "requeueable": True,
    }


def _failures() -> list[Json]:
    nobody = _failure("no worker of the pool has what the job needs: model llama-405b, adapter <id>", 1102)
    return [
        nobody | {"requeueable": False},
        _failure("worker gpu-01-3 died <n> times with this job: exit status 139 (segmentation fault)", 180),
        _failure("tool call: KeyError 'expression' in <path>:<n>", 12),
    ]


def _alarm(name: str, severity: str, title: str) -> Json:
    return {
        "id": name,
        "severity": severity,
        "title": title,
        "since": NOW - 600,
        "evidence": "",
        "text": "What it means, and what one does about it.",
        "doc": f"docs/troubleshooting.md#{name}",
    }


def _alarms() -> list[Json]:
    return [
        _alarm("snapshot-corrupted", "error", "A snapshot is not what was published")
        | {"evidence": "version 49, shard 3: digest 7f3a… instead of 91bc…; 2 workers"},
        _alarm("worker-dies", "error", "A worker dies again and again")
        | {"evidence": "gpu-01-3: 15 deaths in 15 minutes, exit status 139"},
        _alarm("reward-flipped", "warn", "The mean reward changed its sign")
        | {"evidence": "from 0.52 to −0.40 between versions 42 and 43"},
        _alarm("nobody-serves", "warn", "Jobs ask for what no worker has")
        | {"evidence": "1,102 jobs: model llama-405b"},
    ]


def _stretched(value: Any, scale: float) -> Any:
    """The same with all times so many times as far from now."""
    if isinstance(value, float) and value > 1e9:
        return NOW - (NOW - value) * scale
    if isinstance(value, list):
        return [_stretched(it, scale) for it in value]
    return {name: _stretched(it, scale) for name, it in value.items()} if isinstance(value, dict) else value
