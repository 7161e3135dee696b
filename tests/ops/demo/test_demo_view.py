"""What the demo shows while it runs and draws afterwards, from steps made up here."""

from __future__ import annotations

import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rolloutmq.messages import WorkerStatus
from rolloutmq.messages.errors import EngineError
from rolloutmq.ops.demo.incidents import Incidents
from rolloutmq.ops.demo.lines import line
from rolloutmq.ops.demo.pool import PoolSettings, WorkerProcess, Workers
from rolloutmq.ops.demo.report import draw_report
from rolloutmq.ops.demo.tally import Tally
from rolloutmq.ops.demo.trainer import Step
from rolloutmq.ops.demo.watch import Glance, Watch

STEPS = [Step(i, i * 0.5, i / 20, 0.1, Counter({0: 30, 2: 10}), i * 40, 0.1, 0.0, 40) for i in range(1, 21)]
SETTINGS = PoolSettings("redis://127.0.0.1:1/0", "demo", Path("model"), Path())


class StoodIn(WorkerProcess):
    """A worker of which only the outside is looked at: no process."""

    def __init__(self, name: str, pid: int, killed: bool) -> None:
        self.name, self.pid, self.killed, self.started = name, pid, killed, time.monotonic() - 12


def glance(at: float, pids: list[int]) -> Glance:
    fields: dict[str, Any] = {"host": "h", "state": "serving", "version": 7, "finished_samples": 123}
    statuses = {pid: WorkerStatus(worker_id=f"w{pid}", pid=pid, **fields) for pid in pids}
    return Glance(at, 5, statuses)


@pytest.fixture
def workers() -> Workers:
    workers = Workers(SETTINGS)
    workers.all = {"worker-1": StoodIn("worker-1", 1, False), "worker-2": StoodIn("worker-2", 2, True)}
    return workers


@pytest.fixture
def watch() -> Watch:
    watch = Watch("redis://127.0.0.1:1/0", "demo")
    now = time.monotonic()
    watch.glances = [glance(now - 10 + i / 2, [1, 2] if i < 10 else [1]) for i in range(20)]
    return watch


def test_a_line_says_what_was_learned_how_fast_and_by_whom(workers: Workers, watch: Watch) -> None:
    told = line(STEPS, 20, workers, watch)
    assert "step  20/20  reward 0.775  staleness 0.5 (max 2)     80 tok/s  queue 5" in told
    assert told.endswith("worker-1 serving v7, worker-2 killed v7")
    assert "step   1/20  reward 0.050" in line(STEPS[:1], 20, workers, watch)


def test_the_picture_is_drawn(workers: Workers, watch: Watch, tmp_path: Path) -> None:
    incidents = Incidents(workers, watch, Tally(), 5, 8)
    incidents.victim, incidents.killed_at = workers.all["worker-2"], time.monotonic() - 5
    path = tmp_path / "report.png"
    draw_report(path, STEPS, watch, incidents, began=time.monotonic() - 11, title="made up")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_worker_that_ends_by_itself_is_told_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PoolSettings, "command", lambda _: [sys.executable, "-c", "raise SystemExit('no engine here')"])
    with Workers(PoolSettings("redis://127.0.0.1:1/0", "demo", tmp_path, tmp_path)) as started:
        started.start().ended(30)
        with pytest.raises(EngineError, match=r"worker-1 ended by itself(.|\n)*no engine here"):
            started.check()


def test_the_busiest_worker_is_killed_and_counts_as_gone_once_the_pool_has_reaped_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PoolSettings, "command", lambda _: [sys.executable, "-c", "import signal; signal.pause()"])
    with Workers(PoolSettings("redis://127.0.0.1:1/0", "demo", tmp_path, tmp_path)) as started:
        idle, busy = started.start(), started.start()
        incidents = Incidents(started, Watch("redis://127.0.0.1:1/0", "demo"), Tally(), kill_step=3, join_step=99)
        held: dict[int, int] = {}
        monkeypatch.setattr(Watch, "held_now", lambda _, pid: held.get(pid, 0))
        glances = incidents.watch.glances
        glances.append(glance(1.0, [idle.pid, busy.pid]))
        incidents.after(3)
        assert incidents.victim is None  # nobody holds anything: a kill would show nothing
        held[busy.pid] = 5
        incidents.after(4)
        assert incidents.victim is busy
        assert not busy.alive
        assert idle.alive
        started.check()  # a kill is no accident
        assert not incidents.victim_reaped  # the pool still lists it
        glances.append(glance(3.0, [idle.pid]))
        assert incidents.victim_reaped
