"""A publication from the outside: how far it is, and giving it up at every stage."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.peers.publishing import publisher, weights
from support.pools.pool import eventually, worker

from rolloutmq.sync.publish import publisher as module
from rolloutmq.sync.transfer.ledger import Ledger
from rolloutmq.sync.wire import Offer
from rolloutmq.worker.scripted.engine import ScriptedEngine

NBYTES = sum(tensor.numel() * tensor.element_size() for tensor in weights(1).values())


class Held:
    """Stops a function of the publisher's threads where it is called, until `go`."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        owner: Any,
        name: str,
        when: Callable[[Any], bool] = lambda first: True,
    ) -> None:
        """when: looks at the first argument of a call; first: that of the one that was stopped."""
        original, self.reached, self._go = getattr(owner, name), threading.Event(), threading.Event()
        self.first: Any = None

        def held(*args: Any, **kwargs: Any) -> Any:
            if when(args[0]):
                self.first = args[0]
                self.reached.set()
                assert self._go.wait(20)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, held)

    async def there(self) -> None:
        assert await asyncio.to_thread(self.reached.wait, 10)

    def go(self) -> None:
        self._go.set()


def amid_the_buckets(offer: Offer) -> bool:
    return offer.sent_bytes > 0


async def test_progress_from_the_turn_to_the_end(redis_db: str, monkeypatch: pytest.MonkeyPatch) -> None:
    digesting = Held(monkeypatch, module, "_snapshot")
    sending = Held(monkeypatch, Offer, "send", amid_the_buckets)
    async with worker(redis_db) as running, publisher(redis_db, bucket_bytes=2048) as source:
        handle = source.publish(1, weights(1).items())
        await digesting.there()
        waiting = source.publish(2, weights(2).items())
        assert handle.progress().phase == "digesting"
        assert waiting.progress().phase == "waiting"
        digesting.go()
        await sending.there()
        await eventually(lambda: handle.progress().phase == "sending")
        seen = handle.progress()
        assert (seen.total_bytes, seen.workers) == (NBYTES, (running.id,))
        assert 0 < seen.sent_bytes < NBYTES
        sending.go()
        assert (await asyncio.to_thread(handle.wait, 60)).state == "committed"
        done = handle.progress()
        assert (done.phase, done.workers) == ("done", (running.id,))


async def test_what_waits_is_given_up_at_once(redis_db: str, monkeypatch: pytest.MonkeyPatch) -> None:
    digesting = Held(monkeypatch, module, "_snapshot")
    async with worker(redis_db) as running, publisher(redis_db) as source:
        first = source.publish(1, weights(1).items())
        await digesting.there()
        second = source.publish(2, weights(2).items())
        second.abort("not wanted any more")
        report = second.wait(0)
        assert (report.state, report.failures) == ("aborted", {"trainer": "not wanted any more"})
        digesting.go()
        assert (await asyncio.to_thread(first.wait, 60)).state == "committed"
        assert running.generation.version == 1


async def test_what_is_not_announced_yet_never_is(
    redis_db: str, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    digesting = Held(monkeypatch, module, "_snapshot")
    async with worker(redis_db), publisher(redis_db) as source:
        handle = source.publish(1, weights(1).items())
        await digesting.there()
        handle.abort()
        assert not handle.done()
        digesting.go()
        assert (await asyncio.to_thread(handle.wait, 60)).state == "aborted"
        assert await ledger.newest() == {"": 0}


async def test_amid_the_buckets_the_old_weights_serve_on(
    redis_db: str, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with worker(redis_db) as one, worker(redis_db) as two, publisher(redis_db, bucket_bytes=2048) as source:
        assert (await asyncio.to_thread(source.publish(1, weights(1).items()).wait, 60)).state == "committed"
        with monkeypatch.context() as patch:
            sending = Held(patch, Offer, "send", amid_the_buckets)
            handle = source.publish(2, weights(2).items())
            await sending.there()
            handle.abort("the loss went up")
            await eventually(
                lambda: sending.first.over
            )  # else what is left may be sent before the sender's thread knows
            sending.go()
            report = await asyncio.to_thread(handle.wait, 60)
        assert report.state == "aborted"
        assert report.failures.keys() == {one.id, two.id}
        assert all("the loss went up" in why for why in report.failures.values())
        assert await ledger.version_state(2) == "failed"
        for running in (one, two):
            assert all(torch.equal(running.engine.weights[name], sent) for name, sent in weights(1).items())
            assert running.generation.version == 1
        assert (await asyncio.to_thread(source.publish(3, weights(3).items()).wait, 60)).state == "committed"
        await eventually(lambda: one.generation.version == two.generation.version == 3)


async def test_while_workers_are_waited_for(redis_db: str) -> None:
    """A worker that is alive and does not join: the trainer need not wait for the end of the join timeout."""
    async with worker(redis_db) as running, publisher(redis_db, join_timeout_s=60) as source:
        running.generation.state.frozen.acquire()
        handle = source.publish(1, weights(1).items())
        await eventually(lambda: handle.progress().phase == "announced")
        handle.abort()
        report = await asyncio.to_thread(handle.wait, 60)
        assert (report.state, report.failures) == ("aborted", {running.id: "aborted by the trainer"})
        assert await asyncio.to_thread(handle.wait, 60, for_="committed") is report  # there is nothing more to wait for


class Slow(ScriptedEngine):
    """Loads when it is told to, and has then loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded_now, self.tell = asyncio.Event(), asyncio.Event()

    async def commit_weights(self, order: Any) -> Any:
        report = await super().commit_weights(order)
        self.loaded_now.set()
        await self.tell.wait()
        return report


async def test_too_late_is_committed(redis_db: str) -> None:
    engine = Slow()
    async with worker(redis_db, engine=engine) as running, publisher(redis_db) as source:
        handle = source.publish(1, weights(1).items())
        async with asyncio.timeout(20):
            await engine.loaded_now.wait()
        handle.abort()
        engine.tell.set()
        report = await asyncio.to_thread(handle.wait, 60)
        assert (report.state, report.workers) == ("committed", (running.id,))
        handle.abort()
        assert handle.wait(0) is report
