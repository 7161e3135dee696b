"""A commit past SGLang's own way of updating still takes SGLang's lock of updates."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from support.engines.manual import all_that_can_happen_now

from rolloutmq.sync.transfer.order import TransferOrder, TransferReport
from rolloutmq.worker.sglang.weights import commit_weights


class Scheduler:
    """Stands for the channel to one: notes what it is asked and whether SGLang's lock is held then."""

    def __init__(self, lock: asyncio.Lock) -> None:
        self.asked: list[tuple[str, bool]] = []
        self._lock = lock

    async def ask(self, rank: int, question: dict[str, Any]) -> TransferReport:
        self.asked.append((next(iter(question)), self._lock.locked()))
        return TransferReport(ok=True, phase="done")


async def test_a_commit_by_the_control_channel_waits_for_sglangs_lock_and_holds_it() -> None:
    lock = asyncio.Lock()
    manager = SimpleNamespace(rid_to_state={}, model_update_lock=SimpleNamespace(writer_lock=lock))
    scheduler = Scheduler(lock)
    order = TransferOrder(1, 1, "127.0.0.1:1", "token", "", "w", timeout_s=5.0)
    await lock.acquire()  # SGLang does something to the weights itself
    committing = asyncio.create_task(commit_weights(manager, scheduler, order, loader="l", tp_size=1))  # type: ignore[arg-type]
    await all_that_can_happen_now()
    assert scheduler.asked == []
    lock.release()
    assert (await committing).ok
    assert scheduler.asked == [("commit", True)]
    assert not lock.locked()
