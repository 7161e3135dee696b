"""A publication while workers stop, die or are slow: the others have the version, and nobody else is said to fail."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from support.peers.publishing import publisher, weights
from support.pools import scripted_worker
from support.pools.pool import eventually, worker
from support.specimens.messages import job

from rolloutmq import InvalidField, PublishHandle, WeightPublisher
from rolloutmq.messages import Broker, SamplingParams
from rolloutmq.sync.publish.hub import Hub, Outgoing
from rolloutmq.sync.receive import ways
from rolloutmq.sync.transfer.ledger import Ledger
from rolloutmq.sync.transfer.order import TransferOrder, TransferReport
from rolloutmq.worker.scripted.engine import ScriptedEngine

NEVER_S = 600.0
"""A timeout or a lease that a test does not live to see: what waits for it fails."""
PATIENT = {"join_timeout_s": NEVER_S, "transfer_timeout_s": NEVER_S}
WHY = {signal.SIGSTOP: "is stopped: it does not answer", signal.SIGKILL: "was lost: its connection is closed"}


class Victim:
    """A worker in a process of its own, which has joined."""

    def __init__(self, process: subprocess.Popen[bytes], broker: Broker) -> None:
        self._process, self._broker, self.id = process, broker, ""

    def signal(self, number: signal.Signals) -> None:
        os.kill(self._process.pid, number)

    async def version(self) -> int | None:
        """As its last heartbeat said; None before the first one."""
        for each in await self._broker.workers():
            if each.pid == self._process.pid:
                self.id = each.worker_id
                return each.version
        return None


@asynccontextmanager
async def victim(url: str, broker: Broker) -> AsyncIterator[Victim]:
    environment = {**os.environ, **scripted_worker.environment(url)}
    process = subprocess.Popen(scripted_worker.command(lease_s=NEVER_S), env=environment)  # noqa: ASYNC220 – it only forks
    try:
        made = Victim(process, broker)
        await eventually(lambda: is_version(made, 0), 60, "its start")
        yield made
    finally:
        process.kill()
        await asyncio.to_thread(process.wait)


async def is_version(one: Victim, version: int) -> bool:
    return await one.version() == version


def begin(source: WeightPublisher, version: int) -> PublishHandle:
    return source.publish(version, weights(version).items())


async def publish(source: WeightPublisher, version: int) -> Any:
    return await ended(begin(source, version))


async def ended(handle: PublishHandle) -> Any:
    return await asyncio.to_thread(handle.wait, 60)


async def test_the_next_versions_begin_while_a_stopped_worker_is_waited_for(
    redis_db: str, broker: Broker, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not seen here that it is stopped. Only its connection tells that it is gone, in the end."""
    monkeypatch.setattr("rolloutmq.sync.publish.hub.SILENT_S", NEVER_S)
    async with (
        worker(redis_db, lease_s=NEVER_S) as one,
        worker(redis_db, lease_s=NEVER_S) as two,
        victim(redis_db, broker) as lost,
        publisher(redis_db, **PATIENT) as source,
    ):
        others = {one.id, two.id}
        assert (await publish(source, 1)).failures == {}
        lost.signal(signal.SIGSTOP)
        handles = []
        for version in (2, 3):
            handles.append(begin(source, version))
            await eventually(lambda: one.generation.version == two.generation.version == len(handles) + 1)
            early = await asyncio.to_thread(handles[-1].wait, 60, for_="committed")
            assert (early.version, early.state, early.failures) == (version, "committed", {})
            assert set() < set(early.workers) <= others
        assert not any(handle.done() for handle in handles)
        with pytest.raises(InvalidField, match="for_='some'"):
            handles[0].wait(60, for_="some")  # type: ignore[arg-type]
        handles.append(begin(source, 4))
        report = await ended(handles[0])  # two are followed at a time
        assert (report.state, set(report.workers)) == ("committed", others)
        assert report.failures == {lost.id: "had not reported when version 4 was published"}
        await eventually(lambda: one.generation.version == two.generation.version == 4)
        assert await ledger.committed() == 4
        assert not any(handle.done() for handle in handles[1:])
        lost.signal(signal.SIGKILL)
        for handle in handles[1:]:
            report = await ended(handle)
            assert (report.state, set(report.workers)) == ("committed", others)
            assert report.failures == {lost.id: WHY[signal.SIGKILL]}


class Noting(ScriptedEngine):
    """Notes what it has loaded."""

    def __init__(self, tokens_per_s: float | None = None) -> None:
        super().__init__(tokens_per_s)
        self.loaded_versions: list[int] = []

    async def commit_weights(self, order: TransferOrder) -> TransferReport:
        report = await super().commit_weights(order)
        assert report.ok, report
        self.loaded_versions.append(order.version)
        return report


async def test_slow_workers_finish_what_they_began_and_the_trainer_keeps_two_versions_for_them(
    redis_db: str, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    take, offer, kept = ways.take, Hub.offer, list[list[int]]()
    free, reached, amid = threading.Event(), set[str](), dict[str, int]()

    def held(lines: Any, order: TransferOrder, *told: Any, **more: Any) -> None:
        if amid.get(order.worker) == order.version:
            reached.add(order.worker)
            assert free.wait(60)
        take(lines, order, *told, **more)

    def counted(self: Hub, *told: Any) -> Outgoing:
        made = offer(self, *told)
        kept.append([each.snapshot.manifest.version for each in self._outgoing.values()])
        return made

    monkeypatch.setattr("rolloutmq.sync.receive.ways.take", held)
    monkeypatch.setattr(Hub, "offer", counted)
    slow, slower = Noting(), Noting()
    async with (
        worker(redis_db) as fast,
        worker(redis_db, engine=slow) as one,
        worker(redis_db, engine=slower) as two,
        publisher(redis_db, **PATIENT) as source,
    ):
        amid |= {one.id: 1, two.id: 2}
        handles = []
        for version in range(1, 5):
            handles.append(begin(source, version))
            await eventually(lambda version=version: fast.generation.version == version)
            if version == 1:
                await eventually(lambda: two.generation.version == 1 and reached == {one.id})
            if version == 2:
                await eventually(lambda: reached == {one.id, two.id})
        for version, behind in ((1, {one.id}), (2, {one.id, two.id})):
            report = await ended(handles[version - 1])
            assert report.state == "committed"
            assert report.failures == dict.fromkeys(
                behind, f"had not reported when version {version + 2} was published"
            )
        handles.append(begin(source, 5))
        free.set()
        await eventually(lambda: {each.generation.version for each in (fast, one, two)} == {5})
        for handle in handles[2:]:  # who went on to a newer version does not come for these
            handle.abort("it has been replaced")
            assert (await ended(handle)).state == "committed"
        assert (slow.loaded_versions[0], slower.loaded_versions[:2]) == (1, [1, 2])
        assert await ledger.committed() == 5
        assert max(map(len, kept)) <= 3, kept  # with the one that is sent


async def test_giving_up_while_workers_drain(redis_db: str, broker: Broker, ledger: Ledger) -> None:
    """What runs is not interrupted, and goes on with the old weights; nobody waits for its end."""
    engines = Noting(tokens_per_s=1), Noting(tokens_per_s=1)
    async with (
        worker(redis_db, engine=engines[0], max_running=1, prefetch=0, drain_s=0.0) as one,
        worker(redis_db, engine=engines[1], max_running=1, prefetch=0, drain_s=0.0) as two,
        publisher(redis_db, mode="drain", **PATIENT) as source,
    ):
        assert (await publish(source, 1)).state == "committed"
        await broker.enqueue([job(sampling=SamplingParams(max_new_tokens=1000)) for _ in range(2)])
        await eventually(lambda: one.generation.running and two.generation.running)
        handle = begin(source, 2)
        await eventually(lambda: not any(each.generation.gate.is_open for each in (one, two)))
        handle.abort("not wanted")
        report = await ended(handle)
        assert (report.state, report.workers, report.failures.keys()) == ("aborted", (), {one.id, two.id})
        await eventually(lambda: all(each.generation.gate.is_open for each in (one, two)))
        assert one.generation.running == two.generation.running == 1
        assert [engine.loaded_versions for engine in engines] == [[1], [1]]
        assert (await ledger.version_state(2), await ledger.committed()) == ("failed", 1)
