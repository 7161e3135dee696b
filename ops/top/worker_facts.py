"""What a worker's status says, in words."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from rich.text import Text

from .history import History, curve
from .lines import facts, lasting, short
from .reader import Look


def state_of(worker: dict[str, Any]) -> str:
    """Its state, or "silent" when its lease has run out."""
    return str(worker["state"]) if worker["alive"] else "silent"


def stale(worker: dict[str, Any], state: dict[str, Any]) -> int:
    """Number of versions that a worker has yet to get; 0 for one that keeps its version."""
    wanted = state["committed_version"] if worker["hold_version"] is None else worker["hold_version"]
    return max(0, int(wanted) - int(worker["version"]))


def worker_lines(worker_id: str, look: Look, history: History, width: int, styles: Mapping[str, str]) -> list[Text]:
    """A worker's status, the most important lines first."""
    worker = look.worker(worker_id)
    if worker is None:
        return [facts(width, ("gone", "red"), (f"worker {worker_id}", "bold"))]
    state = state_of(worker)
    up = lasting(max(0.0, time.time() - worker["started_at"])) if worker["started_at"] else ""
    behind = stale(worker, look.state)
    newest = "newest weights" if worker["hold_version"] is None else "kept"
    speeds = history.by_worker.get(worker_id, deque())
    return [
        facts(width, (state, styles.get(state, "")), (f"worker {worker_id}", "bold")),
        facts(
            width,
            (f"{worker['running']}/{worker['max_running']} running", ""),
            (f"{worker['held']} samples held", ""),
            (f"version {worker['version']}", ""),
            (f"{behind} behind" if behind else newest, "yellow" if behind else ""),
        ),
        Text(f"{short(worker['tokens_per_s']):>6} tok/s   ").append(curve(speeds, max(0, width - 16)), "green"),
        facts(
            width,
            (f"host {worker['host']}, pid {worker['pid']}", ""),
            (f"up {up}" if up else "", ""),
            (f"{worker['engine']} on {worker['device']}", ""),
        ),
        facts(
            width,
            (f"{short(worker['generated_tokens'])} tokens", ""),
            (f"{short(worker['finished_samples'])} samples", ""),
            (f"{worker['refused_publishes']} refused publishes" if worker["refused_publishes"] else "", "yellow"),
            (f"{worker['engine_restarts']} engine restarts" if worker["engine_restarts"] else "", "yellow"),
        ),
        facts(width, (worker["model"], "dim")),
    ]
