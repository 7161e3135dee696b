"""A process that serves is not stopped by what it was made of: see worker/garbage.py."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
from types import SimpleNamespace
from typing import Any

import pytest

from rolloutmq.worker import main
from rolloutmq.worker.sglang import patches
from rolloutmq.worker.sglang.inside import scheduler


def test_what_is_there_is_left_out_and_what_comes_later_is_not() -> None:
    code = """
        import gc, weakref
        from rolloutmq.worker.garbage import settle

        class Ring:
            def __init__(self): self.me = self

        gc.disable()
        gone, stays = Ring(), Ring()
        before = weakref.ref(gone)
        del gone
        settle()
        assert before() is None, "not collected first: it would stay for ever"
        assert gc.get_freeze_count() > 1000 and len(gc.get_objects()) < 1000

        of_old, later = weakref.ref(stays), Ring()
        of_later = weakref.ref(later)
        del stays, later
        gc.collect()
        assert of_old() is not None and of_later() is None
        """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], timeout=60, check=True)


def test_a_scheduler_settles_before_its_first_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    [listed] = [each for each in patches.PATCHES if each.what == "managers.scheduler:Scheduler"]
    hooks = {name: lambda _self, *_arguments: None for name in listed.has.split()}
    hooks["run_event_loop"] = lambda _self: done.append("loop")
    module: Any = SimpleNamespace(Scheduler=type("Scheduler", (), hooks))
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.scheduler", module)
    monkeypatch.setattr(scheduler, "settle", lambda: done.append("settled"))
    scheduler.install()
    module.Scheduler.run_event_loop(module.Scheduler.__new__(module.Scheduler))
    assert done == ["settled", "loop"]


async def test_a_worker_settles_once_its_engine_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    settled = asyncio.Event()
    monkeypatch.setattr(main, "settle", settled.set)
    worker: Any = SimpleNamespace(joined=asyncio.Event())
    task = asyncio.create_task(main.settled_once_up(worker))
    await asyncio.sleep(0)
    assert not settled.is_set()
    worker.joined.set()
    await task
    assert settled.is_set()
